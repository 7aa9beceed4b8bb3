"""Inlines what `torch.export` nests: the body of `with torch.no_grad():` becomes part of the graph around it."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .autocast import mark_region
from .errors import CaptureError
from .source import origin

FIXED = (
    "in place, which is not supported for the batch and for parameters that take a gradient; use its out-of-place form"
)


def inlined(graph_module: fx.GraphModule, kept: frozenset[str]) -> fx.Graph:
    """The module's graph without nested graphs for `torch.no_grad` and `torch.autocast`; other nested graphs stay.

    No gradient passes into the body of `torch.no_grad`: what it reads is detached. It may change the placeholders named
    in `kept` (buffers, parameters without gradient) in place. Raises CaptureError, with the user's line, where it
    changes anything else.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            enabled, body, *arguments = node.args
            _inline(graph, node, body, arguments, graph_module, kept, bool(enabled))
        elif node.target is torch.ops.higher_order.wrap_with_autocast:
            device, dtype, enabled, _, body, *arguments = node.args
            mark_region(getattr(graph_module, str(body.target)).graph, device, dtype, bool(enabled))  # type: ignore[union-attr,arg-type]
            _inline(graph, node, body, arguments, graph_module, kept, True)
    return graph


def _inline(
    graph: fx.Graph, node: fx.Node, body: Any, arguments: Sequence[Any], graph_module: fx.GraphModule,
    kept: frozenset[str], enabled: bool,
) -> None:  # fmt: skip
    inner = inlined(getattr(graph_module, str(body.target)), kept)
    known: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(node):
        for place, argument in zip((n for n in inner.nodes if n.op == "placeholder"), arguments):
            assert isinstance(argument, fx.Node)
            change = _change(place)
            if change and not enabled and argument.name not in kept:
                if argument.op == "placeholder":
                    raise CaptureError(f"{origin(change)}: `{change.target}` changes {argument.name} {FIXED}")
                raise CaptureError(
                    f"{origin(change)}: `{change.target}` changes an activation in place under torch.no_grad, which is "
                    "not supported; use its out-of-place form"
                )
            same = enabled or change or not isinstance(argument.meta.get("val"), torch.Tensor)
            known[place] = argument if same else _detached(graph, argument)
        outputs = graph.graph_copy(inner, known)  # type: ignore[arg-type]
    for user in list(node.users):
        user.replace_all_uses_with(outputs[user.args[1]])  # type: ignore[index,arg-type]
        graph.erase_node(user)
    graph.erase_node(node)
    if not body.users:
        graph.erase_node(body)


def _detached(graph: fx.Graph, value: fx.Node) -> fx.Node:
    detached = graph.call_function(torch.ops.aten.detach.default, (value,))
    detached.meta = copy.copy(value.meta)
    return detached


def _change(value: fx.Node) -> fx.Node | None:
    """The first op that changes `value` in place, or None."""
    for user in value.users:
        if isinstance(user.target, torch._ops.OpOverload) and user.args and user.args[0] is value:
            info = user.target._schema.arguments[0].alias_info
            if info is not None and info.is_write:
                return user
    return None
