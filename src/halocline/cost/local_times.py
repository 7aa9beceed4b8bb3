"""Where the time of a local computation comes from: a table of measured times, else the machine's roofline."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..errors import PlanError
from ..gradients import ALONE, Manner
from ..graph import Graph, Node
from ..ops.rule import At
from ..region import Region
from .machine import Machine
from .work import CONTRACTIONS, VIEWS, work_of


@dataclass(frozen=True)
class LocalCall:
    """One rank's part of a node, as it is timed: `Call` without what changes from step to step."""

    node: Node
    at: At
    reads: tuple[Region, ...]
    writes: Region
    wanted: tuple[bool, ...]
    manner: Manner = ALONE

    @cached_property
    def key(self) -> str:
        """What tells one local computation from another: op, attributes, local shapes, dtypes, wanted gradients."""
        node = self.node
        attrs = ",".join(f"{key}={value}" for key, value in sorted(node.attrs.items()) if value is not None)
        shapes = ";".join(
            f"{'x'.join(map(str, region.shape))}:{type.dtype}{'!' if want else ''}"
            for region, type, want in zip(self.reads, node.input_types, self.wanted, strict=True)
        )
        made = "x".join(map(str, self.writes.shape))
        number = "" if node.output is None else f"#{node.output}"
        beside = "=" * self.manner.overwrite + f"+{self.manner.then}" * bool(self.manner.then)
        return f"{node.op}{number}({attrs})[{shapes}]->{made}{beside}".replace("torch.", "")


@dataclass
class LocalTimes:
    """The seconds of local computations on a machine; those asked for that were not measured are in `missing`."""

    machine: Machine
    format: str = "preserve"  # the memory format of activations
    measured: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    missing: dict[str, LocalCall] = field(default_factory=dict)

    def seconds(self, call: LocalCall) -> tuple[float, float]:
        """The forward and the backward time of a call."""
        if call.writes.empty or call.manner.absorbed:
            return 0.0, 0.0
        key = table_key(call, self.format)
        if key in self.measured:
            forward, backward = self.measured[key]
            around = self.machine.local.runtime_s
            return forward + around, backward + around * any(call.wanted)
        self.missing.setdefault(key, call)
        return self.modelled(call.node, call.reads, call.writes, call.wanted)

    def modelled(
        self, node: Node, reads: Sequence[Region], writes: Region, wanted: Sequence[bool]
    ) -> tuple[float, float]:
        """The times by the roofline."""
        local, dtype = self.machine.local, node.type.dtype
        if node.op in VIEWS:
            return local.overhead_s, local.overhead_s if any(wanted) else 0.0
        does = work_of(node, reads, writes, wanted)
        counts = node.op in CONTRACTIONS  # everything else is bound by memory
        forward = local.seconds(does.flops * counts, does.moved_bytes, dtype)
        if not any(wanted):
            return forward, 0.0
        backward = local.seconds(does.grad_flops * counts, does.grad_bytes, dtype)
        return forward, backward


def table_key(call: LocalCall, format: str) -> str:
    """The key of a call in a table of times measured with activations in a memory format."""
    return call.key if format == "preserve" else f"{format} {call.key}"


def activation_format(graph: Graph) -> Literal["channels_last", "preserve"]:
    """The memory format that a step chooses for activations by itself: where it convolves in 4 bytes or less."""
    fast = any(node.op in ("conv2d", "conv3d") and node.type.dtype.itemsize <= 4 for node in graph.nodes)
    return "channels_last" if fast else "preserve"


def read_table(path: Path) -> dict[str, tuple[float, float]]:
    """The measured times of a table file. Raises PlanError for a file that is not one."""
    try:
        document: Any = json.loads(path.read_text())
        return {str(key): (float(value[0]), float(value[1])) for key, value in document["local_times_s"].items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise PlanError(
            f"table of local times {path}: expected JSON with `local_times_s`, from calls to [forward, backward] "
            f"seconds; found {type(error).__name__}: {error}"
        ) from error


def local_times(machine: Machine, graph: Graph) -> LocalTimes:
    """The machine's source of local times for a graph, with its table where it has one."""
    table = read_table(Path(machine.table)) if machine.table else {}
    return LocalTimes(machine, activation_format(graph), table)
