"""ReLU, in place where nobody else looks at its input, and with a gradient that needs its output only."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .pointwise import Pointwise
from .rule import Call, Example, Grads, register, torch_op


class Relu(Pointwise):
    """The output alone tells where the input was positive, so the input need not be kept."""

    overwrites = True

    def forward(self, call: Call, inputs: Sequence[Tensor]) -> tuple[Tensor, Any]:
        output = torch.relu_(inputs[0]) if call.overwrite else torch.relu(inputs[0])
        return output, output if call.wanted[0] else None

    def backward(self, call: Call, saved: Any, grad: Tensor) -> Grads:
        return (torch.ops.aten.threshold_backward(grad, saved, 0),)

    def example(self, rng: random.Random) -> Example:
        shape = [rng.randint(1, 7) for _ in range(rng.randint(0, 5))]
        return Example(torch_op("relu").default, (torch.randn(shape, dtype=torch.float64),))


register(Relu(), "relu")
