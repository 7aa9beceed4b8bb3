"""Pieces of a tensor: by ranges (`slice`, `select`, `narrow`, `unfold`) and by numbers (`gather`, `index`)."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PlanError
from ..graph import Node
from ..region import Interval, Region
from .call_op import aten, call_op
from .intervals import replaced
from .pointwise import broadcast
from .rule import At, Call, Dims, Example, Rule, Signature, index_names, register

SLICING = ("slice.Tensor", "select.int", "narrow.default", "unfold.default")


@dataclass(frozen=True)
class Cut:
    """Output entry `i` along `dim` shows the `width` inputs that begin at `start + i * step`."""

    dim: int
    start: int
    step: int = 1
    width: int = 1

    def reads(self, out: Interval) -> Interval:
        first, last = out
        return (
            (self.start + first * self.step, self.start + (last - 1) * self.step + self.width)
            if first < last
            else (0, 0)
        )


def cut_of(node: Node) -> Cut:
    """What a slicing op keeps; ends and negative numbers count as in Python."""
    shape = node.input_types[0].shape
    if node.op == "unfold":
        return Cut(node["dimension"] % len(shape), 0, node["step"], node["size"])
    dim = node["dim"] % len(shape)
    start = node["index" if node.op == "select" else "start"] or 0
    start = min(max(start + shape[dim] if start < 0 else start, 0), shape[dim])
    return Cut(dim, start, node["step"] if node.op == "slice" else 1)


class Slice(Rule):
    """The sliced dim may be split by its output entries: a part reads from its first entry to its last."""

    def signature(self, node: Node) -> Signature:
        shape, dim = node.input_types[0].shape, cut_of(node).dim
        names = index_names(len(shape))
        if node.op == "select":
            kept = names[:dim] + names[dim + 1 :]
            return Signature(dict(zip(kept, node.type.shape)), ((*names[:dim], None, *names[dim + 1 :]),), kept)
        output = (*names, None) if node.op == "unfold" else names
        return Signature(dict(zip(names, node.type.shape)), (names,), output)

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        cut = cut_of(node)
        name = index_names(len(node.input_types[0].shape))[cut.dim]
        (region,) = super().reads(node, at)
        return (replaced(region, cut.dim, cut.reads((0, 1) if node.op == "select" else at[name])),)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        (x,), cut = inputs, cut_of(call.node)
        if call.node.op == "select":
            return x.select(cut.dim, 0)
        if call.node.op == "unfold":
            return x.unfold(cut.dim, cut.width, cut.step)
        return x[(slice(None),) * cut.dim + (slice(None, None, cut.step),)]

    def example(self, rng: random.Random) -> Example:
        op, rank = rng.choice(SLICING), rng.randint(1, 5)
        shape = [rng.randint(1, 8) for _ in range(rank)]
        dim = rng.randrange(rank)
        x, size = torch.randn(shape, dtype=torch.float64), shape[dim]
        dim -= rng.choice((0, rank))
        if op == "slice.Tensor":
            start = rng.choice((None, rng.randint(-size - 2, size - 1)))
            end = rng.choice((None, rng.randint(1, size + 2), -rng.randint(0, size), (1 << 63) - 1))
            return Example(aten("aten.slice.Tensor"), (x, dim, start, end, rng.choice((1, 1, 2, 3))))
        if op == "select.int":
            return Example(aten("aten.select.int"), (x, dim, rng.randrange(-size, size)))
        if op == "narrow.default":
            start = rng.randrange(size)
            return Example(
                aten("aten.narrow.default"), (x, dim, start - rng.choice((0, size)), rng.randint(1, size - start))
            )
        return Example(aten("aten.unfold.default"), (x, dim, rng.randint(1, size), rng.randint(1, 4)))


class Gather(Rule):
    """Entries picked along `dim`: that dim of the source is read whole, everything else may be split."""

    def signature(self, node: Node) -> Signature:
        rank = len(node.type.shape)
        names = index_names(rank)
        source: Dims = names
        if rank:
            dim = node["dim"] % rank
            source = (*names[:dim], None, *names[dim + 1 :])
        index = names if node.op == "gather" else (names[dim],) if rank and len(node.input_types[1].shape) else ()
        return Signature(dict(zip(names, node.type.shape)), (source, index), names)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return call_op(call.node, inputs)

    def example(self, rng: random.Random) -> Example:
        shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
        dim = rng.randrange(len(shape))
        x = torch.randn(shape, dtype=torch.float64)
        if rng.random() < 0.5:
            index = torch.randint(shape[dim], (rng.randint(1, 7),))
            return Example(aten("aten.index_select.default"), (x, dim - rng.choice((0, len(shape))), index))
        picked = [rng.randint(1, 7) if d == dim else rng.randint(1, size) for d, size in enumerate(shape)]
        index = torch.randint(shape[dim], picked)
        return Example(aten("aten.gather.default"), (x, dim - rng.choice((0, len(shape))), index))


class Index(Rule):
    """`x[..., i, j]` with tensors of numbers: the dims they index are read whole, all others may be split."""

    def signature(self, node: Node) -> Signature:
        if any(type.dtype in (torch.bool, torch.uint8) for type in node.input_types[1:]):
            raise PlanError(
                f"{node.where()}: a mask as index gives a shape that depends on values. Use `torch.where` instead."
            )
        rank, out_rank = len(node.input_types[0].shape), len(node.type.shape)
        names = index_names(out_rank)
        indexed = [int(role.partition(".")[2]) for role in node.roles[1:]]
        picked = out_rank - (rank - len(indexed))  # dims of the index tensors, broadcast against each other
        together = indexed == list(range(indexed[0], indexed[-1] + 1))
        first = indexed[0] if together else 0  # where torch puts these dims in the output
        rest = iter(names[:first] + names[first + picked :])
        source = tuple(None if dim in indexed else next(rest) for dim in range(rank))
        middle = names[first : first + picked]
        sizes = node.type.shape[first : first + picked]
        indices = tuple(broadcast(type.shape, sizes, middle) for type in node.input_types[1:])
        return Signature(dict(zip(names, node.type.shape)), (source, *indices), names)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return call_op(call.node, inputs)

    def example(self, rng: random.Random) -> Example:
        shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
        x = torch.randn(shape, dtype=torch.float64)
        picked = [rng.randint(1, 5) for _ in range(rng.randint(0, 2))]
        indexed = rng.sample(range(len(shape)), rng.randint(1, len(shape)))
        indices: list[Tensor | None] = [None] * (max(indexed) + 1)
        for dim in indexed:
            ones = [1 if rng.random() < 0.2 else size for size in picked[rng.randint(0, len(picked)) :]]
            indices[dim] = torch.randint(-shape[dim], shape[dim], ones)
        return Example(aten("aten.index.Tensor"), (x, indices))


register(Slice(), *SLICING)
register(Gather(), "gather", "index_select")
register(Index(), "index")
