"""Ops without a rule of their own: split over samples where that is known to be right, else replicated."""

import torch
from torch import Tensor

from ..errors import PlanError
from ..graph import Node
from .call_op import aten, call_op
from .rule import Call, Rule, Signature, register, rule_of


class Replicated(Rule):
    """Every rank reads the whole inputs and computes the whole output."""

    def signature(self, node: Node) -> Signature:
        draws = node.attrs.get("dropout", 1) != 0 and node.attrs.get("train", True)  # recurrent nets may not
        if torch.Tag.nondeterministic_seeded in aten(node.target).tags and draws:
            raise PlanError(
                f"{node.where()} draws random numbers and has no rule: its replicas would differ. "
                "Draw outside the model and pass the result in, or use dropout."
            )
        return Signature(
            {}, tuple((None,) * len(type.shape) for type in node.input_types), (None,) * len(node.type.shape)
        )

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return call_op(call.node, inputs)


class SampleWise(Rule):
    """An op that treats the entries along dim 0 of its first input and of its output one by one."""

    def signature(self, node: Node) -> Signature:
        def dims(rank: int) -> tuple[str | None, ...]:
            return ("n", *(None,) * (rank - 1))

        first, *rest = node.input_types
        inputs = (dims(len(first.shape)), *((None,) * len(type.shape) for type in rest))
        return Signature({"n": node.type.shape[0]}, inputs, dims(len(node.type.shape)))

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return call_op(call.node, inputs)


REPLICATED = Replicated()


def rule_for(node: Node) -> Rule:
    """The node's rule; `REPLICATED` for an op that has none."""
    return rule_of(node) or REPLICATED


register(SampleWise(), "lp_pool2d", "fractional_max_pool2d", "im2col", "col2im")
