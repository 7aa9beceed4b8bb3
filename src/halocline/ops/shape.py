"""Other shapes for the same numbers: permuted, merged and divided dims."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, prod

import torch
from torch import Tensor

from ..graph import Node
from ..region import Region
from .call_op import aten, call_op
from .intervals import nothing, replaced, scaled
from .rule import At, Call, Dims, Example, Rule, Signature, index_names, register

PERMUTING = "permute transpose swapaxes swapdims t numpy_T mT mH matrix_H adjoint movedim moveaxis".split()
RESHAPING = (
    "reshape view _unsafe_view flatten unflatten ravel view_as reshape_as squeeze unsqueeze "
    "atleast_1d atleast_2d atleast_3d"
).split()


class Permute(Rule):
    """The dims change places and take their splits along."""

    def signature(self, node: Node) -> Signature:
        shape = node.input_types[0].shape
        names = index_names(len(shape))
        # A tensor whose dims all differ in size shows where the op puts each of them.
        probe = torch.empty(tuple(range(1, len(shape) + 1)), device="meta")
        return Signature(
            dict(zip(names, shape)), (names,), tuple(names[size - 1] for size in call_op(node, (probe,)).shape)
        )

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return call_op(call.node, inputs)

    def example(self, rng: random.Random) -> Example:
        op, rank = rng.choice(PERMUTING), rng.randint(1, 5)
        if op in ("t", "numpy_T", "mT", "mH", "matrix_H", "adjoint"):
            rank = 2
        x = torch.randn([rng.randint(1, 6) for _ in range(rank)], dtype=torch.float64)

        def dim(number: int) -> int:
            return number - rng.choice((0, rank))

        one, other = dim(rng.randrange(rank)), dim(rng.randrange(rank))
        some = rng.randint(1, rank)
        if op == "permute":
            return Example(aten("aten.permute.default"), (x, [dim(d) for d in rng.sample(range(rank), rank)]))
        if op in ("movedim", "moveaxis"):
            if rng.random() < 0.5:
                return Example(aten(f"aten.{op}.int"), (x, one, other))
            source, target = ([dim(d) for d in rng.sample(range(rank), some)] for _ in range(2))
            return Example(aten(f"aten.{op}.intlist"), (x, source, target))
        if op in ("transpose", "swapaxes", "swapdims"):
            return Example(aten(f"aten.{op}.{'int' if op == 'transpose' else 'default'}"), (x, one, other))
        return Example(aten(f"aten.{op}.default"), (x,))


@dataclass(frozen=True)
class Block:
    """Dims `inputs` of the input, in sequence, become dims `outputs` of the output.

    The index runs over the largest steps along the first dims of both sides that hold the same entries: one step is
    `reads` entries of the first input dim and `writes` entries of the first output dim.
    """

    inputs: range
    outputs: range
    size: int = 1
    reads: int = 1
    writes: int = 1

    @property
    def divides(self) -> bool:
        """Whether there is something to split."""
        return bool(self.inputs and self.outputs) and (self.size > 1 or self.reads == self.writes == 1)


def blocks(source: Sequence[int], result: Sequence[int]) -> tuple[Block, ...]:
    """The shortest sequences of dims of `source` and `result` that hold the same entries; none for empty tensors.

    >>> [(list(b.inputs), list(b.outputs), b.size, b.reads, b.writes) for b in blocks((2, 6, 5, 4), (2, 3, 2, 20))]
    [([0], [0], 2, 1, 1), ([1], [1, 2], 3, 2, 1), ([2, 3], [3], 5, 1, 4)]
    """
    found: list[Block] = []
    i = j = 0
    while 0 not in source and (i < len(source) or j < len(result)):
        a, b = (shape[at] if at < len(shape) else None for shape, at in ((source, i), (result, j)))
        if a == 1 != b:  # a dim of size 1 comes and goes by itself
            found.append(Block(range(i, i + 1), range(j, j)))
        elif b == 1 != a:
            found.append(Block(range(i, i), range(j, j + 1)))
        else:
            found.append(_block(source, result, i, j))
        i, j = found[-1].inputs.stop, found[-1].outputs.stop
    return tuple(found)


def _block(source: Sequence[int], result: Sequence[int], i: int, j: int) -> Block:
    stop_i, stop_j = i + 1, j + 1
    while (a := prod(source[i:stop_i])) != (b := prod(result[j:stop_j])):
        stop_i, stop_j = stop_i + (a < b), stop_j + (b < a)
    stride_i, stride_j = prod(source[i + 1 : stop_i]), prod(result[j + 1 : stop_j])
    step = lcm(stride_i, stride_j)
    return Block(range(i, stop_i), range(j, stop_j), a // step, step // stride_i, step // stride_j)


class Reshape(Rule):
    """Of dims that are merged, or that one dim is divided into, the first may be split: its parts stay boxes."""

    def signature(self, node: Node) -> Signature:
        split = self._split(node)
        source: list[str | None] = [None] * len(node.input_types[0].shape)
        result: list[str | None] = [None] * len(node.type.shape)
        for name, block in split.items():
            source[block.inputs[0]] = result[block.outputs[0]] = name
        others: list[Dims] = [(None,) * len(type.shape) for type in node.input_types[1:]]
        indices = {name: block.size for name, block in split.items()}
        return Signature(indices, (tuple(source), *others), tuple(result))

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        region = Region.whole(node.input_types[0].shape)
        for name, block in self._split(node).items():
            region = replaced(region, block.inputs[0], scaled(at[name], block.reads))
        return region, *map(nothing, node.input_types[1:])

    def writes(self, node: Node, at: At) -> Region:
        region = Region.whole(node.type.shape)
        for name, block in self._split(node).items():
            region = replaced(region, block.outputs[0], scaled(at[name], block.writes))
        return region

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        if "dtype" in call.node.attrs:
            return call_op(call.node, inputs)
        return inputs[0].reshape(call.writes.shape)

    def _split(self, node: Node) -> dict[str, Block]:
        if "dtype" in node.attrs:  # `view` as another dtype: bytes, not numbers, keep their places
            return {}
        shape = node.input_types[0].shape
        names = index_names(len(shape))
        return {names[block.inputs[0]]: block for block in blocks(shape, node.type.shape) if block.divides}

    def example(self, rng: random.Random) -> Example:
        op = rng.choice(RESHAPING)
        x = torch.randn(_shape(rng), dtype=torch.float64)
        rank, result = x.dim(), _reshaped(rng, x.shape)
        start = rng.randrange(rank)
        if op in ("reshape", "view", "_unsafe_view"):
            if op == "view" and rng.random() < 0.2:
                return Example(aten("aten.view.dtype"), (x.float(), torch.int32))
            if rng.random() < 0.5 and result:
                result[rng.randrange(len(result))] = -1
            return Example(aten(f"aten.{op}.default"), (x, result))
        if op == "flatten":
            end = rng.randrange(start, rank)
            return Example(
                aten("aten.flatten.using_ints"), (x, start - rng.choice((0, rank)), end - rng.choice((0, rank)))
            )
        if op == "unflatten":
            return Example(
                aten("aten.unflatten.int"),
                (x, start - rng.choice((0, rank)), _reshaped(rng, x.shape[start : start + 1])),
            )
        if op in ("view_as", "reshape_as"):
            return Example(aten(f"aten.{op}.default"), (x, torch.randn(result, dtype=torch.float64)))
        if op == "unsqueeze":
            return Example(aten(f"aten.{op}.default"), (x, rng.randint(-rank - 1, rank)))
        if op == "squeeze":
            dims = rng.sample(range(-rank, 0), rng.randint(0, rank))
            return rng.choice((
                Example(aten("aten.squeeze.default"), (x,)),
                Example(aten("aten.squeeze.dim"), (x, start)),
                Example(aten("aten.squeeze.dims"), (x, dims)),
            ))  # fmt: skip
        return Example(aten(f"aten.{op}.default"), (x,))


def _shape(rng: random.Random) -> list[int]:
    return [rng.choice((1, 1, 2, 3, 4, 6, 8)) for _ in range(rng.randint(1, 5))]


def _reshaped(rng: random.Random, shape: Sequence[int]) -> list[int]:
    """A random shape with as many entries: dims merged, divided, or all mixed."""
    result: list[int] = []
    for size in shape:
        if result and rng.random() < 0.35:
            result[-1] *= size
        else:
            result.append(size)
    at = rng.randrange(len(result))
    part = rng.choice([part for part in range(1, result[at] + 1) if result[at] % part == 0])
    if rng.random() < 0.6:
        result[at : at + 1] = [part, result[at] // part]
    if rng.random() < 0.2:
        rng.shuffle(result)
    if rng.random() < 0.2:
        result.insert(rng.randint(0, len(result)), 1)
    return result


register(Permute(), *PERMUTING)
register(Reshape(), *RESHAPING)
