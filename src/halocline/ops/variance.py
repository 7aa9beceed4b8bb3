"""Variance and standard deviation over dims, with or without the mean, from moments merged over ranks."""

import random
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..graph import Node
from .moments import local_moments
from .reduce import kept_shape, reduced_dims, reduced_indices, reduced_signature, reduced_size, reduction_example
from .rule import Call, Example, Reduction, Signature, StagedRule, Stages, register


def degrees_of_freedom(node: Node) -> float:
    """What the sum of squared deviations is divided by."""
    correction = node.attrs.get("correction")
    if correction is None:
        correction = 1 if node.attrs.get("unbiased", True) else 0
    return max(0.0, float(reduced_size(node) - correction))


class Variance(StagedRule):
    """Squared deviations from the mean of all ranks, merged by Chan et al. (1979)."""

    def signature(self, node: Node) -> Signature:
        return reduced_signature(node)

    def reductions(self, node: Node) -> tuple[Reduction, ...]:
        return (Reduction("moments", reduced_indices(node)),)

    def forward_stages(self, call: Call, inputs: Sequence[Tensor]) -> Stages:
        (x,) = inputs
        _, mean, squares = yield local_moments(x, reduced_dims(call.node))
        result = squares / degrees_of_freedom(call.node)
        if call.node.op.startswith("std"):
            result = result.sqrt()
        output = mean if call.node.output == 1 else result
        output = output.to(call.node.type.dtype).reshape(call.writes.shape)
        return output, (x, mean, result) if call.wanted[0] else None

    def backward_stages(self, call: Call, saved: Any, grad: Tensor) -> Stages:
        yield from ()
        x, mean, result = saved
        factor = grad.reshape(kept_shape(call)).double()
        if call.node.output == 1:
            grad_x = (factor / reduced_size(call.node)).to(x.dtype).expand(x.shape).contiguous()
            return (grad_x,)
        factor = factor * 2 / degrees_of_freedom(call.node)
        if call.node.op.startswith("std"):
            factor = (factor / (2 * result)).masked_fill(result == 0, 0.0)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return ((x - mean.to(wide)).mul_(factor.to(wide)).to(x.dtype),)

    def example(self, rng: random.Random) -> Example:
        name = rng.choice(("var", "std", "var_mean", "std_mean"))
        overload = rng.choice(("default", "dim", "correction"))
        attrs: dict[str, Any] = {"unbiased": rng.random() < 0.5}
        if overload == "correction":
            attrs = {"correction": rng.choice((None, 0, 1, 2))}
        while True:
            example = reduction_example(rng, f"{name}.{overload}", **attrs)
            (x,), dims = example.args, example.kwargs.get("dim", range(example.args[0].dim()))
            if prod(x.shape[dim] for dim in dims) > 2:  # torch warns at every call where the divisor would be zero
                return example


register(Variance(), "var", "std", "var_mean", "std_mean")
