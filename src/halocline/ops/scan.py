"""Ops that go along one dim and treat all others entry by entry: running sums, sorting, halves."""

import random

import torch
from torch import Tensor

from ..graph import Node
from .call_op import aten, call_op
from .rule import Call, Dims, Example, Rule, Signature, index_names, register

SCANS = "cumsum cumprod cummax cummin logcumsumexp".split()
SORTS = "sort argsort topk kthvalue median.dim nanmedian.dim mode".split()


class AlongDim(Rule):
    """All dims but `dim` may be split; `dim` itself is read, and written or summed up, whole."""

    def signature(self, node: Node) -> Signature:
        shape = node.input_types[0].shape
        if not shape:
            return Signature({}, ((),), ())
        names = index_names(len(shape))
        dim = node.attrs.get("dim", 0) % len(shape)  # `msort` goes along dim 0
        rest = names[:dim] + names[dim + 1 :]
        output: Dims = rest if len(node.type.shape) < len(shape) else (*names[:dim], None, *names[dim + 1 :])
        indices = {name: size for name, size in zip(names, shape) if name in rest}
        return Signature(indices, ((*names[:dim], None, *names[dim + 1 :]),), output)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return call_op(call.node, inputs)

    def example(self, rng: random.Random) -> Example:
        op = rng.choice((*SCANS, *SORTS, "msort", "glu"))
        shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
        dim = rng.randrange(len(shape))
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


register(AlongDim(), *SCANS, *SORTS, "msort", "glu")
