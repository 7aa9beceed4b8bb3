"""Makes a captured graph say without views what in-place ops on views, and `out=` arguments, do.

`y[:, 0].mul_(2)` changes `y` through a view of it. In the graph it becomes a product, which `select_scatter` puts into
a new `y`; whoever looks at `y` or at a view of it afterwards looks at the new one. In-place ops whose memory nobody
else looks at afterwards stay as they are: renaming their result is enough.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from .autocast import LEAF_CAST
from .errors import CaptureError
from .inline import FIXED
from .ops.call_op import bound
from .source import origin

aten = torch.ops.aten
Make = Callable[..., fx.Node]

# In-place ops whose out-of-place form has another name or overload.
FUNCTIONAL: dict[str, Any] = {
    "aten.bernoulli_.float": aten.bernoulli.p,
    "aten.normal_.default": aten.normal_functional.default,
    "aten.zero_.default": aten.zeros_like.default,
}
RESHAPED = (
    "view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as alias contiguous to ravel "
    "detach lift lift_fresh dropout feature_dropout alpha_dropout feature_alpha_dropout"
).split()
# Ops that return their input itself when they have nothing to do, which their schemas do not say.
MAY_RETURN_INPUT = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
PIECES = ("chunk", "split", "split_with_sizes", "tensor_split", "unbind", "unsafe_split", "unsafe_chunk")


@dataclass
class _View:
    """`node` shows the memory of `parent`, and `target(*args)` with `parent` in front makes it."""

    parent: fx.Node
    target: Any
    arguments: Mapping[str, Any]


def functional(graph: fx.Graph, buffers: frozenset[str], fixed: frozenset[str]) -> fx.Graph:
    """The graph without in-place ops on what is looked at under another name later, and without `out=`.

    `buffers` names the placeholders that may change in place, `fixed` those that may not (parameters and the batch).
    Raises CaptureError, with the user's line, for a change through a view that cannot be put back.
    """
    return _Functional(graph, buffers, fixed).graph


class _Functional:
    def __init__(self, graph: fx.Graph, buffers: frozenset[str], fixed: frozenset[str]) -> None:
        self.graph, self.buffers, self.fixed = graph, buffers, fixed
        self.views: dict[fx.Node, _View] = {}
        self.pieces: dict[fx.Node, dict[str, Any]] = {}  # the arguments of a call that returns several views
        self.maybe: dict[fx.Node, fx.Node] = {}  # what a node shows by its op's schema, also where it is a copy
        self.same: dict[fx.Node, fx.Node] = {}  # the result of an in-place op is what it changed
        self.now: dict[fx.Node, fx.Node] = {}  # what holds the value of a node that was changed, or shows one
        self.version: dict[fx.Node, int] = {}  # how often what a node shows had been changed when `now` was made
        order = list(graph.nodes)
        self.last = {node: position for position, user in enumerate(order) for node in user.all_input_nodes}
        self.replaced: list[fx.Node] = []
        for position, node in enumerate(order):
            if node.op in ("call_function", "output"):
                self._visit(node, position)
        for node in reversed(order):
            if not node.users and (node in self.replaced or (node in self.now and node.op == "call_function")):
                graph.erase_node(node)

    def _visit(self, node: fx.Node, position: int) -> None:
        changed = self._changed(node)
        if changed is None:
            self._note_view(node)
            self._look_at_now(node)
            if (root := self._root(node)) in self.now:
                self.now[node], self.version[node] = node, self.version[root]
            return
        target, op, arguments = self._canonical(changed[0]), *changed[1:]
        renamed = str(node.target) not in FUNCTIONAL and node.target._overloadname != "out"  # type: ignore[union-attr]
        copied = op is aten.copy.default  # which has no gradient
        if renamed and not (copied and target.name not in self.buffers) and self._alone(target, position):
            self._look_at_now(node)
        else:
            with self.graph.inserting_before(node):
                made = self._maker(node)
                if copied:
                    value = self._current(arguments["src"])
                else:
                    value = made(op, **fx.map_arg(arguments, self._current))
                self._put_back(node, target, self._like(node, target, value, made), made)
            self.replaced.append(node)
        self.same[node] = target

    def _changed(self, node: fx.Node) -> tuple[fx.Node, Any, dict[str, Any]] | None:
        """What the node changes in place, the op that makes the new value, and that op's arguments."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            return None
        given = bound(target, node.args, node.kwargs)
        written = [a.name for a in target._schema.arguments if a.is_write and isinstance(given[a.name], fx.Node)]
        packet = getattr(aten, target._schema.name.removeprefix("aten::").rstrip("_"), None)
        if written == ["out"]:
            rest = {name: value for name, value in given.items() if name != "out"}
            names = list(rest)
            for overload in packet.overloads() if packet is not None else ():
                found = getattr(packet, overload)
                if [argument.name for argument in found._schema.arguments] == names and not found._schema.is_mutable:
                    return given["out"], found, rest
        elif target._schema.name.endswith("_") and target._schema.arguments[0].is_write:
            found = FUNCTIONAL.get(str(target)) or getattr(packet, target._overloadname, None)
            if found is not None:
                known = {argument.name for argument in found._schema.arguments}
                given = {name: value for name, value in given.items() if name in known}
            first = next(iter(given.values())) if given else None
            return (first, found, given) if isinstance(first, fx.Node) else None
        return None

    def _canonical(self, node: fx.Node) -> fx.Node:
        while node in self.same:
            node = self.same[node]
        return node

    def _root(self, node: fx.Node) -> fx.Node:
        node = self._canonical(node)
        while node in self.views:
            node = self._canonical(self.views[node].parent)
        return node

    def _group(self, node: fx.Node) -> fx.Node:
        node = self._canonical(node)
        while node in self.maybe:
            node = self._canonical(self.maybe[node])
        return node

    def _alone(self, target: fx.Node, position: int) -> bool:
        """Whether the graph's reader can rename: no other node that may show the same memory is looked at later."""
        group = self._group(target)
        return self._root(target) not in self.now and all(
            self._canonical(other) is target or self._group(other) is not group
            for other in (group, *self.same, *self.maybe)  # all others show memory of their own
            if self.last.get(other, -1) > position
        )

    def _look_at_now(self, node: fx.Node) -> None:
        """Makes the node read what its inputs hold now."""
        with self.graph.inserting_before(node):
            node.args = fx.map_arg(node.args, self._current)
            node.kwargs = fx.map_arg(node.kwargs, self._current)

    def _current(self, asked: fx.Node) -> fx.Node:
        node, root = self._canonical(asked), self._root(asked)
        if root not in self.now:
            return asked
        if self.version.get(node) != self.version[root]:
            view = self.views[node]
            arguments = {_first(view.target): self._current(view.parent), **view.arguments}
            self.now[node] = self._maker(node)(view.target, **arguments)
            self.version[node] = self.version[root]
        return self.now[node]

    def _note_view(self, node: fx.Node) -> None:
        target = node.target
        if target is getitem:
            source, number = node.args
            if source not in self.pieces:
                return
            given = self.pieces[source]  # type: ignore[index]
            parent, dim, pieces = given["self"], given["dim"], source.meta["val"]  # type: ignore[union-attr]
            self.maybe[node] = parent
            if "unbind" in str(source.target):  # type: ignore[union-attr]
                self.views[node] = _View(parent, aten.select.int, {"dim": dim, "index": number})
                return
            start = sum(piece.shape[dim] for piece in pieces[:number])
            arguments = {"dim": dim, "start": start, "end": start + pieces[number].shape[dim], "step": 1}
            self.views[node] = _View(parent, aten.slice.Tensor, arguments)
        elif isinstance(target, torch._ops.OpOverload) and target._schema.name.removeprefix("aten::") in PIECES:
            self.pieces[node] = bound(target, node.args, node.kwargs)
        elif isinstance(target, torch._ops.OpOverload) and isinstance(node.meta.get("val"), Tensor):
            given = bound(target, node.args, node.kwargs)
            shown = [a.name for a in target._schema.arguments if a.alias_info is not None and not a.is_write]
            if target._schema.name.removeprefix("aten::") in MAY_RETURN_INPUT:
                shown = [_first(target)]
            if shown == [_first(target)] and isinstance(given[shown[0]], fx.Node):
                parent = given.pop(shown[0])
                self.maybe[node] = parent
                if _shares(target, parent, given):
                    self.views[node] = _View(parent, target, given)

    def _put_back(self, node: fx.Node, target: fx.Node, value: fx.Node, made: Make) -> None:
        """`target` holds `value` from now on, and so do all that show its memory."""
        root = self._root(target)
        if root.name in self.fixed:
            raise CaptureError(f"{origin(node)}: `{node.target}` changes {root} {FIXED}")
        parents = []
        step = target
        while step in self.views:
            parents.append(step)
            step = self._canonical(self.views[step].parent)
        held = [self._current(self.views[step].parent) for step in parents]
        version = self.version.get(root, 0) + 1
        self.now[target], self.version[target] = value, version
        for step, parent in zip(parents, held):
            view = self.views[step]
            value = self._scattered(node, view, parent, value, made)
            above = self._canonical(view.parent)
            self.now[above], self.version[above] = value, version
        if root.name in self.buffers:
            made(aten.copy_.default, root, value)

    def _scattered(self, node: fx.Node, view: _View, parent: fx.Node, value: fx.Node, made: Make) -> fx.Node:
        op, given = view.target._schema.name.removeprefix("aten::"), dict(view.arguments)
        shape = parent.meta["val"].shape
        if op == "slice":
            return made(aten.slice_scatter.default, parent, value, **given)
        if op == "select":
            return made(aten.select_scatter.default, parent, value, **given)
        if op == "narrow":
            start = given["start"]
            return made(aten.slice_scatter.default, parent, value, given["dim"], start, start + given["length"])
        if op == "diagonal":
            return made(aten.diagonal_scatter.default, parent, value, **given)
        if op == "permute":
            dims = [dim % len(shape) for dim in given["dims"]]
            return made(aten.permute.default, value, [dims.index(dim) for dim in range(len(dims))])
        if op in ("transpose", "swapaxes", "swapdims", "t", "mT", "adjoint"):
            return made(view.target, value, *given.values())
        if op == "detach" and self._carries(parent):
            raise CaptureError(f"{origin(node)}: `{node.target}` changes, through `.data` or `.detach()`, a value that "
                               "has a gradient, which autograd would not see. Change a copy.")  # fmt: skip
        if op in RESHAPED and value.meta["val"].numel() == parent.meta["val"].numel():
            return value if value.meta["val"].shape == shape else made(aten.reshape.default, value, list(shape))
        raise CaptureError(f"{origin(node)}: `{node.target}` changes a view made by `{op}` in place, which is not "
                           "supported; use its out-of-place form")  # fmt: skip

    def _like(self, node: fx.Node, target: fx.Node, value: fx.Node, made: Make) -> fx.Node:
        """`value` in the shape and dtype of what is changed."""
        old, new = target.meta["val"], value.meta["val"]
        if new.dtype != old.dtype:
            value = made(aten.to.dtype, value, old.dtype)
        if node.target is aten.copy_.default and new.shape != old.shape:
            return made(aten.expand.default, value, list(old.shape))
        if new.shape != old.shape:
            raise CaptureError(
                f"{origin(node)}: `{node.target}` would turn shape {tuple(old.shape)} into {tuple(new.shape)} in place"
            )
        return value

    def _carries(self, node: fx.Node) -> bool:
        """Whether a gradient could flow through the node: it depends on a parameter or on the batch."""
        seen, stack = set(), [node]
        while stack:
            step = stack.pop()
            if step in seen or step.target is aten.detach.default:
                continue
            seen.add(step)
            if step.name in self.fixed and step.meta["val"].is_floating_point():
                return True
            stack += step.all_input_nodes
        return False

    def _maker(self, like: fx.Node) -> Make:
        def make(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            made = self.graph.call_function(target, args, kwargs)
            made.meta = {key: value for key, value in like.meta.items() if key != LEAF_CAST}
            with torch.no_grad():
                made.meta["val"] = target(*fx.map_arg(args, _value), **fx.map_arg(kwargs, _value))
            return made

        return make


def _value(node: fx.Node) -> Any:
    value = node.meta["val"]
    return value.detach() if isinstance(value, Tensor) else value


def _first(target: Any) -> str:
    return str(target._schema.arguments[0].name)


def _shares(target: Any, parent: fx.Node, given: Mapping[str, Any]) -> bool:
    """Whether the op returns a view here: some do only where memory allows it."""
    source = _value(parent)
    with torch.no_grad():
        result = target(source, **fx.map_arg(dict(given), _value))
    return bool(result.untyped_storage()._cdata == source.untyped_storage()._cdata)
