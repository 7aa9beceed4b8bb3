"""Entries that change places along a dim: flips, turns, rolls, differences of neighbours, triangles."""

import random

import torch
from torch import Tensor

from ..graph import Node
from ..region import Interval, Region
from .call_op import aten, call_op
from .intervals import replaced
from .rule import At, Call, Example, Rule, Signature, cut, index_names, register

FLIPS = ("flip", "fliplr", "flipud", "rot90")


class Flip(Rule):
    """A part reads the mirrored interval, counted from the other end of the whole tensor."""

    def signature(self, node: Node) -> Signature:
        shape = node.input_types[0].shape
        names = index_names(len(shape))
        output = list(names)
        if node.op == "rot90" and node["k"] % 2:
            one, other = node["dims"]
            output[one], output[other] = output[other], output[one]
        return Signature(dict(zip(names, shape)), (names,), tuple(output))

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        (region,) = super().reads(node, at)
        for dim in _mirrored(node):
            size, (first, last) = node.input_types[0].shape[dim], region.intervals[dim]
            region = replaced(region, dim, (size - last, size - first))
        return (region,)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return call_op(call.node, inputs)

    def example(self, rng: random.Random) -> Example:
        op, rank = rng.choice(("flip", *FLIPS)), rng.randint(2, 5)
        x = torch.randn([rng.randint(1, 6) for _ in range(rank)], dtype=torch.float64)
        dims = [dim - rng.choice((0, rank)) for dim in rng.sample(range(rank), rng.randint(0, rank))]
        if op == "flip":
            return Example(aten("aten.flip.default"), (x, dims))
        if op == "rot90":
            one, other = rng.sample(range(rank), 2)
            return Example(aten("aten.rot90.default"), (x, rng.randint(-3, 6), [one, other - rng.choice((0, rank))]))
        return Example(aten(f"aten.{op}.default"), (x,))


def _mirrored(node: Node) -> list[int]:
    """The dims of the input that are read backwards."""
    rank = len(node.type.shape)
    if node.op == "rot90":  # a quarter turn mirrors one dim and then exchanges both
        one, other = (dim % rank for dim in node["dims"])
        return [[], [other], [one, other], [one]][node["k"] % 4]
    if node.op == "flip":
        return [dim % rank for dim in node["dims"]]
    return [int(node.op == "fliplr")]


class Roll(Rule):
    """A part reads the interval it comes from; a part that wraps around the end reads the whole dim."""

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        if not node["dims"]:  # rolled as if flattened
            return Signature({}, ((None,) * len(names),), (None,) * len(names))
        return Signature(dict(zip(names, node.type.shape)), (names,), names)

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        (region,) = super().reads(node, at)
        for dim, shift in _shifts(node).items():
            region = replaced(region, dim, _source(node.type.shape[dim], shift, region.intervals[dim]))
        return (region,)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        if not call["dims"]:
            return x.roll(call["shifts"])
        for dim, shift in _shifts(call.node).items():
            size, (first, last) = call.node.type.shape[dim], call.writes.intervals[dim]
            if _wraps(size, shift, (first, last)):
                x = cut(x.roll(shift, dim), dim, first, last - first)
        return x

    def example(self, rng: random.Random) -> Example:
        rank = rng.randint(1, 5)
        x = torch.randn([rng.randint(1, 7) for _ in range(rank)], dtype=torch.float64)
        dims = [rng.randrange(-rank, rank) for _ in range(rng.randint(0, 3))]
        shifts = [rng.randint(-9, 9) for _ in dims or (0,)]
        return Example(aten("aten.roll.default"), (x, shifts, dims))


def _shifts(node: Node) -> dict[int, int]:
    """How far each dim is rolled; a dim may be named twice."""
    shifts: dict[int, int] = {}
    for dim, shift in zip(node["dims"], node["shifts"]):
        dim %= len(node.type.shape)
        shifts[dim] = (shifts.get(dim, 0) + shift) % max(1, node.type.shape[dim])
    return shifts


def _wraps(size: int, shift: int, out: Interval) -> bool:
    """Whether the outputs `out` come from both ends of a dim of `size` that is rolled by `shift`."""
    return out[0] < shift < out[1]


def _source(size: int, shift: int, out: Interval) -> Interval:
    if _wraps(size, shift, out):
        return 0, size
    first = (out[0] - shift) % max(1, size)
    return first, first + out[1] - out[0]


class Diff(Rule):
    """Differences of neighbours, `n` times over: outputs `[a, b)` read inputs `[a, b + n)`."""

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        dim = node["dim"] % len(names)
        if len(node.inputs) == 1:
            return Signature(dict(zip(names, node.type.shape)), (names,), names)
        # With something put before or behind, the dim itself stays whole.
        dims = (*names[:dim], None, *names[dim + 1 :])
        indices = {name: size for name, size in zip(names, node.type.shape) if name in dims}
        return Signature(indices, (dims,) * len(node.inputs), dims)

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        regions = super().reads(node, at)
        if len(node.inputs) > 1:
            return regions
        dim = node["dim"] % len(node.type.shape)
        (region,), size = regions, node.input_types[0].shape[dim]
        first, last = region.intervals[dim]
        return (replaced(region, dim, (first, min(last + node["n"], size) if last > first else first)),)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        prepend, append = call.given(inputs, "prepend"), call.given(inputs, "append")
        return torch.diff(inputs[0], call["n"], call["dim"], prepend, append)

    def example(self, rng: random.Random) -> Example:
        shape = [rng.randint(1, 7) for _ in range(rng.randint(1, 4))]
        dim = rng.randrange(len(shape))

        def tensor(size: int) -> Tensor:
            return torch.randn([*shape[:dim], size, *shape[dim + 1 :]], dtype=torch.float64)

        ends = [tensor(rng.randint(1, 2)) if rng.random() < 0.3 else None for _ in "ab"]
        n = rng.randint(0, shape[dim] - 1)
        return Example(aten("aten.diff.default"), (tensor(shape[dim]), n, dim - rng.choice((0, len(shape))), *ends))


class Triangle(Rule):
    """`tril` and `triu`: the diagonal of a part lies where that part begins."""

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        return Signature(dict(zip(names, node.type.shape)), (names,), names)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        (top, _), (left, _) = call.writes.intervals[-2:]
        keep = torch.tril if call.node.op == "tril" else torch.triu
        return keep(inputs[0], call["diagonal"] + top - left)

    def example(self, rng: random.Random) -> Example:
        x = torch.randn([rng.randint(1, 6) for _ in range(rng.randint(2, 4))], dtype=torch.float64)
        return Example(aten(f"aten.{rng.choice(('tril', 'triu'))}.default"), (x, rng.randint(-4, 4)))


register(Flip(), *FLIPS)
register(Roll(), "roll")
register(Diff(), "diff")
register(Triangle(), "tril", "triu")
