"""Which layer is split how, as a table."""

from dataclasses import dataclass, replace

from rich.table import Table

from halocline.graph import Node
from halocline.ops import rule_for
from halocline.ops.pointwise import Pointwise
from halocline.program import Program


@dataclass(frozen=True)
class Row:
    """A layer and what follows it in place: its ops, its split, its output and what one rank has to do with it."""

    layer: str
    ops: tuple[str, ...]
    split: str
    shape: tuple[int, ...]
    part: tuple[int, ...]
    received_bytes: int


def rows(program: Program, rank: int) -> list[Row]:
    """A row for each layer in order; element-wise ops and norms go with the layer whose output they change."""
    placement, found = program.placement, list[Row]()
    last, fetched, constant = "", set[str](), set(program.graph.replicated)
    for node in program.graph.nodes:
        if constant.issuperset(node.inputs):  # counters of batches and the like
            constant.add(node.name)
            continue
        parts = placement.parts[node.name]
        split = " ".join(f"{index}/{len(dim.parts)}" for index, dim in parts.items()) or "whole"
        received = 0
        for key in set(program.feeds[node.name]) & program.fetches.keys() - fetched:
            fetch = program.fetches[key]
            received += fetch.transfer.received_bytes(rank, program.graph.types[fetch.value].dtype.itemsize)
        fetched.update(program.feeds[node.name])
        row = Row(node.origin.module or node.name, (node.op,), split, node.type.shape,
                  placement.layouts[node.name].region(rank).shape, received)  # fmt: skip
        before = found[-1] if found else row
        if _in_place(node) and last in node.inputs and (before.split, before.part) == (row.split, row.part):
            found[-1] = replace(before, ops=(*before.ops, node.op), received_bytes=before.received_bytes + received)
        else:
            found.append(row)
        last = node.name
    return found


def _in_place(node: Node) -> bool:
    return isinstance(rule_for(node), Pointwise) or node.op.endswith(("norm", "dropout"))


def table(found: list[Row], rank: int) -> Table:
    """The rows for a terminal."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    shown.add_column("layer", no_wrap=True)
    shown.add_column("ops")
    shown.add_column("split", style="cyan", no_wrap=True)
    for title in ("output", f"of it rank {rank}", "receives"):
        shown.add_column(title, justify="right", no_wrap=True)
    for row in found:
        ops = " ".join(f"{op} x{row.ops.count(op)}" if row.ops.count(op) > 1 else op for op in dict.fromkeys(row.ops))
        shown.add_row(row.layer, ops, row.split, _by(row.shape), _by(row.part), _size(row.received_bytes))
    return shown


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _size(nbytes: int) -> str:
    if not nbytes:
        return "-"
    return f"{nbytes} B" if nbytes < 1000 else f"{nbytes / 1000:.1f} kB" if nbytes < 1e6 else f"{nbytes / 1e6:.1f} MB"
