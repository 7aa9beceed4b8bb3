"""Sums and concatenations: linear, so that nothing need be kept for their gradients."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .call_op import call_op
from .pointwise import Pointwise
from .rule import Call, Example, Grads, register, torch_op


class Add(Pointwise):
    """`input + alpha * other`: a residual connection keeps neither of its inputs."""

    fresh = True

    def forward(self, call: Call, inputs: Sequence[Tensor]) -> tuple[Tensor, Any]:
        output: Tensor = call_op(call.node, inputs)
        return output, output.dtype if any(call.wanted) else None

    def backward(self, call: Call, saved: Any, grad: Tensor) -> Grads:
        grads: list[Tensor | None] = []
        for role, region, type, want in zip(call.node.roles, call.reads, call.node.input_types, call.wanted):
            share = grad.sum_to_size(region.shape) if want else None
            if share is not None and role == "other" and call["alpha"] != 1:
                share = share * call["alpha"]
            grads.append(None if share is None else share.to(type.dtype))
        return tuple(grads)

    def example(self, rng: random.Random) -> Example:
        shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 5))]
        other = [1 if rng.random() < 0.3 else size for size in shape[rng.randint(0, len(shape)) :]]
        x, y = torch.randn(shape, dtype=torch.float64), torch.randn(other, dtype=torch.float64)
        if rng.random() < 0.2:
            return Example(torch_op("add").Scalar, (x, rng.uniform(-2, 2), 1))
        alpha = {"alpha": rng.choice((1, 1, -2, 0.5))}
        return Example(torch_op("add").Tensor, rng.choice(((x, y), (y, x), (x, x))), alpha)


register(Add(), "add")
