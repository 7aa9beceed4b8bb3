"""Concatenation: every part of the output reads of each input what falls into it, maybe nothing."""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..graph import Node
from ..region import Region, meet
from .call_op import aten
from .intervals import nothing, replaced
from .rule import At, Call, Example, Grads, Rule, Signature, along, index_names, register

JOINED_DIM = {"vstack": 0, "row_stack": 0, "hstack": 1, "dstack": 2}


class Concat(Rule):
    """Also along the joined dim the output may be split; a part reads the shifted interval of each input, clipped."""

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        if _joined(node) is None:
            return Signature({}, tuple((None,) * len(t.shape) for t in node.input_types), (None,) * len(names))
        # torch lets inputs of shape [0] pass whatever the others' rank is.
        inputs = tuple(names if len(t.shape) == len(names) else (None,) for t in node.input_types)
        return Signature(dict(zip(names, node.type.shape)), inputs, names)

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        dims, joined = self.signature(node).inputs, _joined(node)
        if joined is None:
            return tuple(Region.whole(t.shape) for t in node.input_types)
        rank = len(node.type.shape)
        first, last = at[index_names(rank)[joined]]
        sizes = [type.shape[joined] if len(type.shape) == rank else 0 for type in node.input_types]
        regions = []
        for type, names, size, end in zip(node.input_types, dims, sizes, accumulate(sizes)):
            region, start = along(type, names, at), end - size
            if len(type.shape) == rank:
                region = replaced(region, joined, meet((0, size), (first - start, last - start)))
            regions.append(region)
        return tuple(regions)

    def forward(self, call: Call, inputs: Sequence[Tensor]) -> tuple[Tensor, Any]:
        joined = _joined(call.node)
        if joined is None:
            return super().forward(call, inputs)
        with torch.no_grad():
            return self.run(call, *inputs), joined if any(call.wanted) else None

    def backward(self, call: Call, saved: Any, grad: Tensor) -> Grads:
        """The gradient of a part is a slice of the whole's: no input need be kept."""
        if not isinstance(saved, int):
            return super().backward(call, saved, grad)
        grads, start = [], 0
        for region, type, want in zip(call.reads, call.node.input_types, call.wanted):
            size = region.shape[saved] if len(region.shape) == grad.dim() else 0
            grads.append(grad.narrow(saved, start, size).to(type.dtype) if want and size else None)
            start += size
        return tuple(grads)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        joined = _joined(call.node)
        if joined is None:
            return aten(call.node.target)(list(inputs))
        # Beside an empty tensor `cat` forgets the memory format of the others; without it, perhaps the common dtype.
        return torch.cat([x for x in inputs if x.numel()], joined).to(call.node.type.dtype)

    def example(self, rng: random.Random) -> Example:
        op = rng.choice(("cat", "cat", "cat", "concat", "concatenate", *JOINED_DIM))
        rank = rng.randint(1, 5)
        dim = rng.randrange(rank)
        if op in JOINED_DIM:
            dim = JOINED_DIM[op] if rank > JOINED_DIM[op] else 0
        shape = [rng.randint(1, 5) for _ in range(rank)]
        tensors = []
        for _ in range(rng.randint(1, 4)):
            shape[dim] = rng.randint(0, 6)
            # Empty ones are whole numbers: there is no gradient of nothing to be summed.
            tensors.append(torch.randn(shape).to(torch.float64 if shape[dim] else torch.int64))
        if op in JOINED_DIM:
            if rank <= max(JOINED_DIM[op], 1):  # torch adds the missing dims first, so the inputs must be alike
                alike = [max(1, size) for size in shape]
                tensors = [torch.randn(alike, dtype=torch.float64) for _ in range(rng.randint(1, 3))]
            return Example(aten(f"aten.{op}.default"), (tensors,))
        if rng.random() < 0.2:
            tensors.append(torch.zeros(0, dtype=torch.int64))
        if rng.random() < 0.3:
            tensors.append(rng.choice(tensors))
        if tensors[0].numel() and rng.random() < 0.2:
            tensors[0] = tensors[0].float()
        rng.shuffle(tensors)
        return Example(aten(f"aten.{op}.default"), (tensors, dim - rng.choice((0, rank))))


def _joined(node: Node) -> int | None:
    """The dim along which the inputs are put together; None where torch would add dims to them first."""
    if node.op not in JOINED_DIM:
        return int(node["dim"]) % len(node.type.shape)
    dim, ranks = JOINED_DIM[node.op], {len(type.shape) for type in node.input_types}
    if node.op == "hstack" and ranks == {1}:
        return 0
    return dim if min(ranks) > dim and min(ranks) >= 2 else None


class Stack(Rule):
    """Along the new dim a part reads the inputs whose numbers fall into it."""

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        dim = node["dim"] % len(names)
        each = names[:dim] + names[dim + 1 :]
        return Signature(dict(zip(names, node.type.shape)), (each,) * len(node.inputs), names)

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        names = index_names(len(node.type.shape))
        first, last = at[names[node["dim"] % len(names)]]
        regions = super().reads(node, at)
        return tuple(
            region if first <= number < last else nothing(type)
            for number, (region, type) in enumerate(zip(regions, node.input_types))
        )

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        dim = call["dim"] % len(call.node.type.shape)
        first, last = call.writes.intervals[dim]
        return torch.stack(inputs[first:last], dim)

    def example(self, rng: random.Random) -> Example:
        rank = rng.randint(0, 4)
        shape = [rng.randint(1, 5) for _ in range(rank)]
        tensors = [torch.randn(shape, dtype=torch.float64) for _ in range(rng.randint(1, 5))]
        if rng.random() < 0.3:
            tensors.append(tensors[0])
        return Example(aten("aten.stack.default"), (tensors, rng.randint(-rank - 1, rank)))


register(Concat(), "cat", "concat", "concatenate", *JOINED_DIM)
register(Stack(), "stack")
