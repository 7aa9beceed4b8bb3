"""Vector norms of any order over dims."""

import random
from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from ..graph import Node
from .reduce import kept_shape, reduced_dims, reduced_indices, reduced_signature, reduction_example, wide
from .rule import Call, Example, Reduction, Signature, StagedRule, Stages, register


def order(node: Node) -> float:
    """The norm's order: 2 unless given."""
    given = node.attrs.get("ord", node.attrs.get("p"))
    return 2.0 if given is None else float(given)


class VectorNorm(StagedRule):
    """Sums of powers (for infinite orders: maxima or minima) of absolute values, combined before the root is taken."""

    def signature(self, node: Node) -> Signature:
        return reduced_signature(node)

    def reductions(self, node: Node) -> tuple[Reduction, ...]:
        return (Reduction({inf: "max", -inf: "min"}.get(order(node), "sum"), reduced_indices(node)),)  # type: ignore[arg-type]

    def grad_reductions(self, node: Node) -> tuple[Reduction, ...]:
        return (Reduction("sum", reduced_indices(node)),) if abs(order(node)) == inf else ()

    def forward_stages(self, call: Call, inputs: Sequence[Tensor]) -> Stages:
        (x,) = inputs
        p, dims = order(call.node), reduced_dims(call.node)
        size = x.to(wide(call.node.type.dtype)).abs()
        if abs(p) != inf:
            powers = (size != 0).to(size.dtype) if p == 0 else size if p == 1 else size.pow(p)
            total = yield powers.sum(dims, keepdim=True)
            norm = total if p in (0, 1) else total.pow(1 / p)
        elif any(x.shape[dim] == 0 for dim in dims):
            norm = yield size.new_full(kept_shape(call), max(-p, 0.0))
        else:
            norm = yield (size.amax if p > 0 else size.amin)(dims, keepdim=True).clone()
        saved = (x, norm) if call.wanted[0] else None
        return norm.to(call.node.type.dtype).reshape(call.writes.shape), saved

    def backward_stages(self, call: Call, saved: Any, grad: Tensor) -> Stages:
        x, norm = saved
        p, x_wide = order(call.node), x.to(norm.dtype)
        grad = grad.reshape(kept_shape(call)).to(norm.dtype)
        if abs(p) == inf:
            equal = x_wide.abs() == norm
            ties = yield equal.sum(reduced_dims(call.node), keepdim=True)
            grad_x = x_wide.sgn().mul_(equal).mul_(grad / ties)
        elif p == 0:
            grad_x = torch.zeros_like(x_wide)
        elif p == 1:
            grad_x = x_wide.sgn().mul_(grad)
        elif p == 2:
            grad_x = x_wide * (grad / norm).masked_fill_(norm == 0, 0.0)
        else:
            scale = (grad * norm.pow(1 - p)).masked_fill_(norm == 0, 0.0)
            powers = x_wide.abs().pow_(p - 1)
            if p < 1:
                powers.masked_fill_(x_wide == 0, 0.0)
            grad_x = x_wide.sgn().mul_(powers).mul_(scale)
        return (grad_x.to(x.dtype),)

    def example(self, rng: random.Random) -> Example:
        p = rng.choice((2, 2, 1, inf, -inf, 0, 3, 1.5, 0.5))
        if rng.random() < 0.7:
            return reduction_example(rng, "linalg_vector_norm", ord=p)
        return reduction_example(rng, rng.choice(("norm.Scalar", "norm.ScalarOpt_dim")), p=p)


register(VectorNorm(), "linalg_vector_norm", "norm")
