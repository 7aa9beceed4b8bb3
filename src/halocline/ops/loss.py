"""Losses that compare element by element: any index may be split; means and sums are summed over ranks."""

import random
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..graph import Node
from .call_op import call_op
from .pointwise import broadcast
from .reduce import wide
from .rule import Call, Example, Reduction, Signature, StagedRule, Stages, index_names, register, torch_op

NONE, MEAN, SUM = 0, 1, 2  # how the ops' argument `reduction` counts
LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "soft_margin_loss poisson_nll_loss hinge_embedding_loss margin_ranking_loss"
).split()


def elements(node: Node) -> tuple[int, ...]:
    """The shape to which the node's inputs are broadcast before they are compared."""
    return tuple(torch.broadcast_shapes(*(type.shape for type in node.input_types)))


class ElementLoss(StagedRule):
    """Each rank takes the sum over its part with torch's own op; a mean divides by the number of all elements."""

    def signature(self, node: Node) -> Signature:
        shape = elements(node)
        names = index_names(len(shape))
        inputs = tuple(broadcast(type.shape, shape, names) for type in node.input_types)
        return Signature(dict(zip(names, shape)), inputs, names if node["reduction"] == NONE else ())

    def reductions(self, node: Node) -> tuple[Reduction, ...]:
        return () if node["reduction"] == NONE else (Reduction("sum", index_names(len(elements(node)))),)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        if call["reduction"] == NONE:
            return call_op(call.node, inputs)
        return call_op(call.node, [x.to(wide(x.dtype)) for x in inputs], {"reduction": SUM})

    def forward_stages(self, call: Call, inputs: Sequence[Tensor]) -> Stages:
        output, saved = self.forward(call, inputs)
        if call["reduction"] != NONE:
            output = yield output.clone()
        if call["reduction"] == MEAN:
            output = output / prod(elements(call.node))
        return output.to(call.node.type.dtype), saved

    def backward_stages(self, call: Call, saved: Any, grad: Tensor) -> Stages:
        yield from ()
        if call["reduction"] == MEAN:
            grad = grad / prod(elements(call.node))
        return self.backward(call, saved, grad)

    def example(self, rng: random.Random) -> Example:
        op = rng.choice(LOSSES)
        shape = [rng.randint(1, 6) for _ in range(rng.randint(0, 5))]
        x, target = (torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1 for _ in range(2))
        attrs: dict[str, Any] = {"reduction": rng.choice((NONE, MEAN, SUM))}
        if op == "smooth_l1_loss":
            attrs["beta"] = rng.choice((1.0, 0.1))
        elif op == "huber_loss":
            attrs["delta"] = rng.choice((1.0, 0.1))
        elif op == "kl_div":
            attrs["log_target"] = rng.random() < 0.5
        elif op == "poisson_nll_loss":
            attrs |= {"log_input": rng.random() < 0.5, "full": rng.random() < 0.5, "eps": 1e-8}
        elif op in ("soft_margin_loss", "hinge_embedding_loss"):
            target = torch.where(target > 0.5, 1, -1)  # whole numbers: torch gives this target no gradient
        elif op.startswith("binary") and shape and rng.random() < 0.6:
            some = [size if rng.random() < 0.7 else 1 for size in shape][rng.randrange(len(shape)) :]
            attrs["weight"] = torch.randint(1, 4, some)
            if op.endswith("logits"):
                attrs["pos_weight"] = torch.randint(1, 4, shape[-1:])
        args: tuple[Tensor, ...] = (x, target)
        if op == "margin_ranking_loss":
            args = (x, target, torch.rand(shape, dtype=torch.float64) - 0.5)
            attrs["margin"] = rng.choice((0.0, 0.1))
        return Example(torch_op(op).default, args, attrs)


register(ElementLoss(), *LOSSES)
