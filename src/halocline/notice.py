"""What a plan does that a user may not expect, said once: ops without a rule, which every rank computes whole."""

import warnings

from .graph import Node
from .ops import rule_for
from .ops.fallback import REPLICATED
from .placement import Placement

_said: set[str] = set()  # the ops that this process has spoken of


class WholeOpWarning(UserWarning):
    """An op has no rule: its inputs are gathered, and every rank computes the whole of it."""


def computed_whole(placement: Placement) -> dict[str, list[Node]]:
    """The nodes without a rule that gather something split, by their op."""
    found: dict[str, list[Node]] = {}
    for node in placement.graph.nodes:
        if rule_for(node) is REPLICATED and any(placement.layouts[name].axes for name in node.inputs):
            found.setdefault(node.op, []).append(node)
    return found


def notice(placement: Placement) -> None:
    """Warns of every op without a rule, once in a process."""
    for op, nodes in computed_whole(placement).items():
        if op not in _said:
            _said.add(op)
            others = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
            warnings.warn(
                f"{nodes[0].where()}{others}: no rule says how to split `{op}`, so its inputs are gathered and every "
                "rank computes the whole of it: right, but neither faster nor smaller. Leave the layers around it "
                "whole in the plan, or add a rule (docs/adding-an-op.md).",
                WholeOpWarning,
                stacklevel=2,
            )
