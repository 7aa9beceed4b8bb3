"""Where the time of a local computation comes from: a table of measured times, else the machine's roofline."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import PlanError
from ..graph import Node
from ..region import Region
from .machine import Machine
from .work import VIEWS, work_of


def call_key(node: Node, reads: Sequence[Region], writes: Region, wanted: Sequence[bool]) -> str:
    """What tells one local computation from another: op, attributes, local shapes, dtypes, wanted gradients."""
    attrs = ",".join(f"{key}={value}" for key, value in sorted(node.attrs.items()) if value is not None)
    shapes = ";".join(
        f"{'x'.join(map(str, region.shape))}:{type.dtype}{'!' if want else ''}"
        for region, type, want in zip(reads, node.input_types, wanted, strict=True)
    )
    return f"{node.op}({attrs})[{shapes}]->{'x'.join(map(str, writes.shape))}".replace("torch.", "")


@dataclass
class LocalTimes:
    """The seconds of local computations on a machine; what was asked for and not measured is in `missing`."""

    machine: Machine
    measured: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    missing: dict[str, tuple[Node, tuple[Region, ...], Region, tuple[bool, ...]]] = field(default_factory=dict)

    def seconds(
        self, node: Node, reads: Sequence[Region], writes: Region, wanted: Sequence[bool]
    ) -> tuple[float, float]:
        """The forward and the backward time of a node that reads `reads` and makes `writes`."""
        if writes.empty:
            return 0.0, 0.0
        if self.measured:
            key = call_key(node, reads, writes, wanted)
            if key in self.measured:
                return self.measured[key]
            self.missing.setdefault(key, (node, tuple(reads), writes, tuple(wanted)))
        return self.modelled(node, reads, writes, wanted)

    def modelled(
        self, node: Node, reads: Sequence[Region], writes: Region, wanted: Sequence[bool]
    ) -> tuple[float, float]:
        """The times by the roofline."""
        local, dtype = self.machine.local, node.type.dtype
        if node.op in VIEWS:
            return local.overhead_s, local.overhead_s if any(wanted) else 0.0
        does = work_of(node, reads, writes, wanted)
        forward = local.seconds(does.flops, does.moved_bytes, dtype)
        if not any(wanted):
            return forward, 0.0
        backward = local.seconds(does.grad_flops, does.grad_bytes, dtype)
        return forward, backward


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


def local_times(machine: Machine) -> LocalTimes:
    """The machine's source of local times, with its table where it has one."""
    return LocalTimes(machine, read_table(Path(machine.table)) if machine.table else {})
