"""Where the time and the memory of a plan go, layer by layer, and what was turned down for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..candidates import parts_in_words
from ..cost.estimate import NodeCost
from ..search import Found, gib


@dataclass(frozen=True)
class Alternative:
    """Another split of a layer, and by how much the step would take longer if all other layers stayed as they are."""

    split: str
    slower_s: float
    nbytes: float


@dataclass(frozen=True)
class Row:
    """A layer with what follows it: its split, its time by kind, what it keeps in memory, and the next best splits."""

    layer: str
    ops: tuple[str, ...]
    split: str
    kept_bytes: float
    alternatives: tuple[Alternative, ...]
    forward_s: float
    backward_s: float
    halo_s: float
    redistribution_s: float
    sums_s: float
    gradient_sum_s: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.halo_s + self.redistribution_s + self.sums_s


def explain(found: Found, alternatives: int = 2) -> tuple[Row, ...]:
    """A row for each group of layers, the longest time first."""
    problem, costs = found.problem, {node.name: node for node in found.estimate.nodes}
    rows = []
    for number, (variable, chosen) in enumerate(zip(problem.variables, found.chosen, strict=True)):
        nodes = [costs[node.name] for node in variable.group.nodes]
        leader = variable.group.leader
        rows.append(
            Row(
                leader.origin.module or leader.name,
                tuple(node.op for node in variable.group.nodes),
                parts_in_words(problem.mesh, variable.splits[chosen]),
                _kept(found, number),
                _alternatives(found, number, alternatives),
                **{part: _sum(nodes, part) for part in _PARTS},
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.layer)))


_PARTS = ("forward_s", "backward_s", "halo_s", "redistribution_s", "sums_s", "gradient_sum_s")


def _sum(nodes: list[NodeCost], part: str) -> float:
    return float(sum(getattr(node, part) for node in nodes))


def _kept(found: Found, number: int) -> float:
    problem, chosen = found.problem, found.chosen
    total = float(problem.variables[number].nbytes[chosen[number]])
    return total + sum(
        float(edge.nbytes[chosen[edge.source], chosen[edge.target]]) for edge in problem.edges if edge.target == number
    )


def _alternatives(found: Found, number: int, count: int) -> tuple[Alternative, ...]:
    problem, chosen = found.problem, found.chosen
    variable = problem.variables[number]
    seconds, nbytes = variable.seconds + variable.sums, np.array(variable.nbytes)
    for edge in problem.edges:
        if edge.target == number:
            seconds = seconds + edge.seconds[chosen[edge.source], :]
            nbytes = nbytes + edge.nbytes[chosen[edge.source], :]
        elif edge.source == number:
            seconds = seconds + edge.seconds[:, chosen[edge.target]]
            nbytes = nbytes + edge.nbytes[:, chosen[edge.target]]
    own = chosen[number]
    order = [int(i) for i in np.argsort(seconds, kind="stable") if i != own][:count]
    return tuple(
        Alternative(
            parts_in_words(problem.mesh, variable.splits[i]),
            float(seconds[i] - seconds[own]),
            float(nbytes[i] - nbytes[own]),
        )
        for i in order
    )


def as_document(found: Found) -> dict[str, Any]:
    """The plan and its explanation, for `--json`."""
    memory = found.estimate.memory
    return {
        "mesh": [list(axis) for axis in found.plan.mesh.axes],
        "origin": found.plan.origin,
        "seconds": found.estimate.seconds,
        "seconds_by_kind": dict(found.estimate.totals),
        "bound_seconds": found.bound_s,
        "gap": found.gap,
        "memory_bytes": memory.total_bytes,
        "memory_limit_bytes": found.memory_limit_bytes,
        "memory_by_kind": {
            "parameters": memory.parameters_bytes,
            "gradients": memory.gradients_bytes,
            "optimizer": memory.optimizer_bytes,
            "kept": memory.kept_bytes,
            "passing": memory.passing_bytes,
        },
        "layers": [
            {
                **{key: value for key, value in vars(row).items() if key != "alternatives"},
                "ops": list(row.ops),
                "alternatives": [vars(other) for other in row.alternatives],
            }
            for row in explain(found)
        ],
    }


def shown(found: Found, most: int = 20) -> RenderableType:
    """The explanation for a terminal: what the step takes, then the layers that take longest."""
    rows = explain(found)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("layer", no_wrap=True)
    table.add_column("split", style="cyan", no_wrap=True)
    for title in ("time", "forward", "backward", "halo", "moved", "sums", "keeps"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("turned down")
    for row in rows[:most]:
        times = (row.seconds, row.forward_s, row.backward_s, row.halo_s, row.redistribution_s, row.sums_s)
        down = ", ".join(f"{other.split} {_more(other.slower_s)}" for other in row.alternatives)
        table.add_row(row.layer, row.split, *map(milliseconds, times), gib(row.kept_bytes), down)
    rest = len(rows) - most
    lines = [Text(line) for line in _head(found)]
    tail = (
        [Text(f"and {rest} more layers, {milliseconds(sum(row.seconds for row in rows[most:]))}")] if rest > 0 else []
    )
    return Group(*lines, table, *tail)


def _head(found: Found) -> list[str]:
    cost, plan = found.estimate, found.plan
    memory = cost.memory
    names = {"forward_s": "forward", "backward_s": "backward", "halo_s": "halos", "redistribution_s": "redistribution",
             "sums_s": "batch sums", "exposed_sums_s": "gradient sums left", "optimizer_s": "optimizer"}  # fmt: skip
    kinds = ", ".join(f"{names[key]} {milliseconds(value)}" for key, value in cost.totals.items() if value)
    gap = "no bound is known" if found.gap is None else f"at most {found.gap:.1%} from the best by the model"
    limit = f" of {gib(found.memory_limit_bytes)}" if found.memory_limit_bytes else ""
    return [
        f"{plan.origin}: {plan.mesh.size} ranks, a step {milliseconds(cost.seconds)} ({gap})",
        f"time: {kinds}",
        f"memory of a rank: {gib(memory.total_bytes)}{limit} (parameters {gib(memory.parameters_bytes)}, gradients "
        f"{gib(memory.gradients_bytes)}, optimizer {gib(memory.optimizer_bytes)}, kept for the backward pass "
        f"{gib(memory.kept_bytes)}, passing {gib(memory.passing_bytes)})",
        "",
    ]


def milliseconds(seconds: float) -> str:
    """A time in words."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us" if seconds else "-"


def _more(seconds: float) -> str:
    return f"+{milliseconds(seconds)}" if seconds >= 0 else f"-{milliseconds(-seconds)} (hidden, or no memory for it)"


def named_splits(found: Found) -> Mapping[str, str]:
    """The split of every group by the module of its leader."""
    return {
        v.group.leader.origin.module or v.group.leader.name: parts_in_words(found.problem.mesh, v.splits[i])
        for v, i in zip(found.problem.variables, found.chosen, strict=True)
    }
