"""Cross entropy and negative log-likelihood: samples and space may be split, classes stay whole."""

import random
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..graph import Node
from .call_op import call_op
from .loss import MEAN, NONE, SUM
from .reduce import wide
from .rule import Call, Dims, Example, Reduction, Signature, StagedRule, Stages, index_names, register, torch_op


def by_class(node: Node) -> bool:
    """Whether the target holds class numbers (else probabilities)."""
    return not node.input_types[1].differentiable


class CrossEntropy(StagedRule):
    """Each rank takes the sum over its part with torch's own op; a mean divides by the summed weight of all targets.

    As in torch, targets that are ignored weigh nothing, and a mean over none is not a number. With probabilities as
    target, the mean is over all samples and points.
    """

    def signature(self, node: Node) -> Signature:
        shape = node.input_types[0].shape
        # A single sample comes without `n`: its classes run along the first dim.
        batch: Dims = () if len(shape) == 1 else tuple(name for name in index_names(len(shape)) if name != "c")
        logits: Dims = (None,) if len(shape) == 1 else (batch[0], None, *batch[1:])
        sizes = (*shape[:1], *shape[2:]) if batch else ()
        target = batch if by_class(node) else logits
        weights = ((None,) for _ in node.input_types[2:])
        indices = {name: size for name, size in zip(batch, sizes) if name}
        return Signature(indices, (logits, target, *weights), batch if node["reduction"] == NONE else ())

    def reductions(self, node: Node) -> tuple[Reduction, ...]:
        return () if node["reduction"] == NONE else (Reduction("sum", tuple(self.signature(node).indices)),)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        if call["reduction"] == NONE:
            return call_op(call.node, inputs)
        inputs = tuple(x.to(wide(x.dtype)) for x in inputs)
        if inputs[0].numel() == 0:
            return inputs[0].sum()
        return call_op(call.node, inputs, {"reduction": SUM})

    def forward_stages(self, call: Call, inputs: Sequence[Tensor]) -> Stages:
        output, saved = self.forward(call, inputs)
        weight = output.new_ones(())
        if call["reduction"] != NONE:
            output, weight = yield torch.stack([output.double(), self._weight(call, inputs)])
        if call["reduction"] == MEAN:
            output = output / weight
        return output.to(call.node.type.dtype), None if saved is None else (saved, weight)

    def _weight(self, call: Call, inputs: Sequence[Tensor]) -> Tensor:
        """What the targets of this rank's part weigh, in fp64."""
        logits, target = inputs[:2]
        weights = call.given(inputs, "weight")
        if not by_class(call.node):
            count = prod(logits.shape) // logits.shape[0 if logits.dim() == 1 else 1]
            return logits.new_tensor(count, dtype=torch.float64)
        counted = target != call["ignore_index"]
        if weights is None:
            return counted.sum().double()
        return weights.gather(0, target.masked_select(counted)).sum(dtype=torch.float64)

    def backward_stages(self, call: Call, saved: Any, grad: Tensor) -> Stages:
        yield from ()
        local, weight = saved
        if call["reduction"] == MEAN:
            grad = grad / weight
        return self.backward(call, local, grad)

    def example(self, rng: random.Random) -> Example:
        shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 5))]
        logits = torch.randn(shape, dtype=torch.float64)
        classes = shape[0] if len(shape) == 1 else shape[1]
        target = torch.randint(0, classes, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())
        attrs: dict[str, Any] = {"reduction": rng.choice((NONE, MEAN, MEAN, SUM))}
        attrs["ignore_index"] = rng.choice((-100, 0, 1))
        if rng.random() < 0.2:
            target = torch.where(torch.rand(target.shape) < 0.5, attrs["ignore_index"], target)
        if rng.random() < 0.3:
            return Example(torch_op("nll_loss_nd").default, (logits, target), attrs)
        attrs["label_smoothing"] = rng.choice((0.0, 0.1))
        if rng.random() < 0.3:
            target, attrs["ignore_index"] = torch.rand(shape, dtype=torch.float64), -100
            if rng.random() < 0.5:
                attrs["weight"] = torch.rand(classes, dtype=torch.float64) + 0.5
        return Example(torch_op("cross_entropy_loss").default, (logits, target), attrs)


register(CrossEntropy(), "cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d")
