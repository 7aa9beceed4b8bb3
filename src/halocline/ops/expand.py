"""Fewer numbers than entries: tensors that are broadcast, repeated, or filled with one number."""

import random
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..graph import Node
from ..region import Interval, Region
from .call_op import aten
from .intervals import nothing, replaced, scaled
from .pointwise import broadcast_dims
from .rule import At, Call, Example, Rule, Signature, index_names, register

FILLING = (
    "zeros_like ones_like full_like empty_like zero fill new_zeros new_ones new_full new_empty zeros ones full empty"
).split()


EXPANDING = ("expand", "expand_as", "broadcast_to")


class Expand(Rule):
    """Dims of size 1 are shown many times: each part of the output reads the whole of them."""

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        x, *others = node.input_types
        inputs = (broadcast_dims(x, node.type), *(broadcast_dims(type, node.type) for type in others))
        return Signature(dict(zip(names, node.type.shape)), inputs, names)

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        return super().reads(node, at)[0], *map(nothing, node.input_types[1:])

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return inputs[0].expand(call.writes.shape)

    def example(self, rng: random.Random) -> Example:
        op, shape = rng.choice(EXPANDING), [rng.randint(1, 5) for _ in range(rng.randint(0, 5))]
        lead = rng.randint(0, len(shape))
        source = [1 if rng.random() < 0.5 else size for size in shape[lead:]]
        x = torch.randn(source, dtype=torch.float64)
        if op == "expand_as":
            return Example(aten("aten.expand_as.default"), (x, torch.randn(shape, dtype=torch.float64)))
        sizes = shape[:lead] + [-1 if a == b and rng.random() < 0.5 else b for a, b in zip(source, shape[lead:])]
        return Example(aten(f"aten.{op}.default"), (x, sizes))


class Repeat(Rule):
    """The whole tensor repeated along its dims: a part that lies within one repetition reads just its place."""

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        new = len(names) - len(node.input_types[0].shape)
        return Signature(dict(zip(names, node.type.shape)), (names[new:],), names)

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        shape = node.input_types[0].shape
        names = index_names(len(node.type.shape))
        wanted = (at[name] for name in names[len(names) - len(shape) :])
        return (Region(tuple(_place(size, out) for size, out in zip(shape, wanted))),)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        shape, out = call.node.input_types[0].shape, call.writes
        new = len(out.intervals) - len(shape)
        counts, cuts = list(out.shape[:new]), [slice(None)] * new
        for size, (first, last) in zip(shape, out.intervals[new:]):
            counts.append((last - 1) // size - first // size + 1)
            cuts.append(slice(first % size, first % size + last - first) if counts[-1] > 1 else slice(None))
        return x.repeat(counts)[tuple(cuts)]

    def example(self, rng: random.Random) -> Example:
        x = torch.randn([rng.randint(1, 5) for _ in range(rng.randint(0, 4))], dtype=torch.float64)
        counts = [rng.choice((1, 1, 2, 3)) for _ in range(x.dim() + rng.randint(0, 1))]
        if rng.random() < 0.5:
            return Example(aten("aten.tile.default"), (x, counts[: rng.randint(0, len(counts))]))
        return Example(aten("aten.repeat.default"), (x, counts))


def _place(size: int, out: Interval) -> Interval:
    """Which entries of a dim of `size` that is repeated the outputs `out` show."""
    first, last = out
    if last <= first or not size or first // size != (last - 1) // size:
        return 0, size
    return first % size, (last - 1) % size + 1


class RepeatInterleave(Rule):
    """Every entry repeated in its place: the index runs over the entries of the input."""

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.input_types[0].shape))
        indices = dict(zip(names, node.input_types[0].shape))
        if node["dim"] is None:  # the flattened tensor, of which parts along the first dim are intervals
            return Signature(
                dict([*indices.items()][:1]), ((*names[:1], *(None,) * len(names[1:])),), names[:1] or (None,)
            )
        return Signature(indices, (names,), names)

    def writes(self, node: Node, at: At) -> Region:
        region, shape = super().writes(node, at), node.input_types[0].shape
        if not shape:
            return region
        dim = 0 if node["dim"] is None else node["dim"] % len(shape)
        each = node["repeats"] * (prod(shape[1:]) if node["dim"] is None else 1)
        return replaced(region, dim, scaled(at[index_names(len(shape))[dim]], each))

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return inputs[0].repeat_interleave(call["repeats"], call["dim"])

    def example(self, rng: random.Random) -> Example:
        x = torch.randn([rng.randint(1, 5) for _ in range(rng.randint(0, 4))], dtype=torch.float64)
        dim = rng.choice((None, *range(-x.dim(), x.dim())))
        return Example(aten("aten.repeat_interleave.self_int"), (x, rng.randint(1, 3), dim))


class OneHot(Rule):
    """Classes as rows of zeros and a one: a new dim at the end, which is written whole."""

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))[:-1]
        return Signature(dict(zip(names, node.type.shape)), (names,), (*names, None))

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        # The number of classes of the whole tensor: a part may lack the highest.
        return torch.nn.functional.one_hot(inputs[0], call.node.type.shape[-1])

    def example(self, rng: random.Random) -> Example:
        shape = [rng.randint(1, 4) for _ in range(rng.randint(0, 4))]
        return Example(aten("aten.one_hot.default"), (torch.randint(5, shape), rng.choice((-1, 5, 7))))


class MeshGrid(Rule):
    """One tensor [A] shown along its own dim of the grid of all; of the others nothing is read."""

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        inputs: list[tuple[str | None, ...]] = [(None,) * len(type.shape) for type in node.input_types]
        if inputs[self._shown(node)]:
            inputs[self._shown(node)] = (names[self._dim(node)],)
        return Signature(dict(zip(names, node.type.shape)), tuple(inputs), names)

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        shown = self._shown(node)
        return tuple(
            region if number == shown else nothing(type)
            for number, (region, type) in enumerate(zip(super().reads(node, at), node.input_types))
        )

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        x, dim = inputs[self._shown(call.node)], self._dim(call.node)
        return x.reshape([-1 if d == dim else 1 for d in range(len(inputs))]).expand(call.writes.shape)

    def _shown(self, node: Node) -> int:
        assert node.output is not None
        return node.output

    def _dim(self, node: Node) -> int:
        shown = self._shown(node)
        return 1 - shown if node.attrs.get("indexing") == "xy" and shown < 2 <= len(node.inputs) else shown

    def example(self, rng: random.Random) -> Example:
        tensors = [
            torch.randn([rng.randint(1, 5)] if rng.random() < 0.8 else [], dtype=torch.float64)
            for _ in range(rng.randint(1, 4))
        ]
        return Example(aten("aten.meshgrid.indexing"), (tensors,), {"indexing": rng.choice(("ij", "xy"))})


class Filled(Rule):
    """One number everywhere: nothing is read but that number, where it is a tensor, and the shape of the part."""

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        inputs = tuple(
            names if type.shape == node.type.shape else (None,) * len(type.shape) for type in node.input_types
        )
        return Signature(dict(zip(names, node.type.shape)), inputs, names)

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        return tuple(map(nothing, node.input_types))

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        if (given := call.given(inputs, "value")) is not None:
            return given.to(call.node.type.dtype).expand(call.writes.shape)
        value = next((call.node.attrs[key] for key in ("value", "fill_value") if key in call.node.attrs), 0)
        device = inputs[0].device if inputs else call["device"]
        return torch.full(
            call.writes.shape, 1 if "ones" in call.node.op else value, dtype=call.node.type.dtype, device=device
        )

    def example(self, rng: random.Random) -> Example:
        op = rng.choice([op for op in FILLING if "empty" not in op and op not in ("zeros", "ones", "full")])
        shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 4))]
        args: list[Any] = [torch.randn(shape, dtype=torch.float64)]
        if op.startswith("new"):
            args.append([rng.randint(1, 5) for _ in range(rng.randint(0, 4))])
        if "full" in op or op == "fill":
            args.append(rng.uniform(-2, 2))
        if op == "fill" and rng.random() < 0.5:
            return Example(aten("aten.fill.Tensor"), (args[0], torch.randn((), dtype=torch.float64)))
        return Example(aten(f"aten.{op}.{'Scalar' if op == 'fill' else 'default'}"), tuple(args))


class Copy(Rule):
    """The source, broadcast to the shape and dtype of a tensor of which nothing is read."""

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        return Signature(
            dict(zip(names, node.type.shape)), (names, broadcast_dims(node.input_types[1], node.type)), names
        )

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        return nothing(node.input_types[0]), super().reads(node, at)[1]

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        x, source = inputs
        return source.to(x.device, x.dtype).expand(call.writes.shape)

    def example(self, rng: random.Random) -> Example:
        shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 4))]
        x = torch.zeros(shape, dtype=rng.choice((torch.int64, torch.int32)))  # of floats torch has no gradient here
        source = [1 if rng.random() < 0.3 else size for size in shape[rng.randint(0, len(shape)) :]]
        return Example(aten("aten.copy.default"), (x, torch.randint(9, source)))


register(Expand(), *EXPANDING)
register(Repeat(), "repeat", "tile")
register(RepeatInterleave(), "repeat_interleave.self_int")
register(OneHot(), "one_hot")
register(MeshGrid(), "meshgrid")
register(Filled(), *FILLING)
register(Copy(), "copy")
