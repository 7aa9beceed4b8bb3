"""Ops that go along one dim and treat all others entry by entry: running sums, sorting, scattering, halves."""

import random

import torch
from torch import Tensor

from ..graph import Node
from .call_op import aten, call_op
from .rule import Call, Dims, Example, Rule, Signature, index_names, register

SCANS = "cumsum cumprod cummax cummin logcumsumexp".split()
SORTS = "sort argsort topk kthvalue median.dim nanmedian.dim mode".split()
BROADCASTING = ("linalg_cross", "cosine_similarity")
PUTS = "scatter scatter_add scatter_reduce slice_scatter select_scatter index_add index_copy index_fill".split()


class AlongDim(Rule):
    """All dims but `dim` may be split, as far as all inputs are of one size there; `dim` itself is read whole."""

    def signature(self, node: Node) -> Signature:
        shape = node.input_types[0].shape
        ranks = {len(type.shape) for type in node.input_types}
        if not shape or (node.op in BROADCASTING and len(ranks) > 1):
            dims = tuple((None,) * len(type.shape) for type in node.input_types)
            return Signature({}, dims, (None,) * len(node.type.shape))
        names = index_names(len(shape))
        dim = node.attrs.get("dim", 0) % len(shape)  # `msort` goes along dim 0
        rest, kept = names[:dim] + names[dim + 1 :], (*names[:dim], None, *names[dim + 1 :])
        inputs: list[Dims] = []
        unlike: set[str | None] = set()
        for role, type in zip(node.roles, node.input_types):
            if len(type.shape) == len(shape):
                inputs.append(kept)
                unlike |= {name for name, a, b in zip(kept, type.shape, shape) if a != b}
            else:
                inputs.append(rest if role == "src" else (None,) * len(type.shape))

        def split(dims: Dims) -> Dims:
            return tuple(None if name in unlike else name for name in dims)

        sizes = dict(zip(names, shape))
        return Signature(
            {name: sizes[name] for name in rest if name not in unlike},
            tuple(map(split, inputs)),
            split(kept if len(node.type.shape) == len(shape) else rest),
        )

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return call_op(call.node, inputs)

    def example(self, rng: random.Random) -> Example:
        op = rng.choice((*SCANS, *SORTS, *PUTS, *BROADCASTING, "msort", "glu"))
        shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
        dim = rng.randrange(len(shape))
        if op in (*PUTS, *BROADCASTING):
            return _put(rng, op, shape, dim)
        if op == "glu":
            shape[dim] *= 2
        x = torch.randn(shape, dtype=torch.float64)
        dim -= rng.choice((0, len(shape)))
        target = aten(f"aten.{op}" if "." in op else f"aten.{op}.default")
        if op == "msort":
            return Example(target, (x,))
        if op in ("topk", "kthvalue"):
            return Example(target, (x, rng.randint(1, shape[dim]), dim, rng.random() < 0.5))
        if op in ("median.dim", "nanmedian.dim", "mode", "sort", "argsort"):
            return Example(target, (x, dim, rng.random() < 0.5))
        return Example(target, (x, dim))


def _put(rng: random.Random, op: str, shape: list[int], dim: int) -> Example:
    size = 3 if op == "linalg_cross" else shape[dim]

    def tensor(along: int | None) -> Tensor:
        return torch.randn([*shape[:dim], *([] if along is None else [along]), *shape[dim + 1 :]], dtype=torch.float64)

    x, number, least = tensor(size), dim - rng.choice((0, len(shape))), rng.randint(0, size - 1)
    if op in BROADCASTING:
        y = tensor(size) if rng.random() < 0.7 else tensor(size)[tuple(slice(0, 1) for _ in shape[:dim])]
        if op == "cosine_similarity" and dim and rng.random() < 0.2:
            x, y = (x, y[0]) if rng.random() < 0.5 else (x[0], y)
            number = dim - len(shape)
        return Example(aten(f"aten.{op}.default"), (x, y), {"dim": number})
    if op == "slice_scatter":
        return Example(aten("aten.slice_scatter.default"), (x, tensor(size - least), number, least))
    if op == "select_scatter":
        return Example(aten("aten.select_scatter.default"), (x, tensor(None), number, least))
    if op.startswith("index"):
        index = torch.tensor(rng.sample(range(size), rng.randint(1, size)))
        if op == "index_fill":
            if rng.random() < 0.5:
                return Example(aten("aten.index_fill.int_Scalar"), (x, number, index, 0.5))
            value = torch.randn((), dtype=torch.float64)
            return Example(aten("aten.index_fill.int_Tensor"), (x, number, index, value))
        return Example(aten(f"aten.{op}.default"), (x, number, index, tensor(len(index))))
    # Each place is written at most once: which of several values remains is not defined.
    ranks = tensor(size).argsort(dim)[(slice(None),) * dim + (slice(0, rng.randint(1, size)),)]
    if rng.random() < 0.3:
        ranks = ranks[: rng.randint(1, len(ranks))]
    source = torch.randn(ranks.shape, dtype=torch.float64)
    if op == "scatter" and rng.random() < 0.5:
        return Example(aten("aten.scatter.value"), (x, number, ranks, 0.5))
    if op == "scatter_reduce":
        return Example(aten("aten.scatter_reduce.two"), (x, number, ranks, source, "amax"))
    return Example(aten(f"aten.{op}.{'src' if op == 'scatter' else 'default'}"), (x, number, ranks, source))


register(AlongDim(), *SCANS, *SORTS, *PUTS, *BROADCASTING, "msort", "glu")
