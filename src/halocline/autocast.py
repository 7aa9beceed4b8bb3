"""Autocast: what `torch.autocast` does inside ops becomes casts in the graph.

An exported graph shows only that an op under autocast returns another dtype. Here the casts of its inputs are observed,
by running it on fake tensors, and written down. Programs then run with autocast off: halos travel in the dtype that is
computed in, and costs are counted in it.
"""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import CaptureError
from .source import origin

REGION = "halocline_autocast"  # in a node's meta: the autocast regions inside the model that it is in, by device type
LEAF_CAST = "halocline_leaf_cast"  # in the meta of a cast: it is of a leaf, which is cast wherever it is read


@dataclass(frozen=True)
class Autocast:
    """The state of autocast for one type of device."""

    device: str
    enabled: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"autocast to {self.dtype}" if self.enabled else "no autocast"


def ambient(device: str) -> Autocast:
    """The state that this thread is in; devices that do not compute, such as `meta`, know no autocast."""
    if not torch.amp.is_autocast_available(device):
        return Autocast(device, False, torch.get_default_dtype())
    return Autocast(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context in which ops compute in the dtypes of their inputs."""
    return torch.autocast(device, enabled=False) if ambient(device).enabled else nullcontext()


def mark_region(graph: fx.Graph, device: str, dtype: torch.dtype | None, enabled: bool) -> None:
    """Notes on every node of the body of a `with torch.autocast(...)` that it is there; inner regions come first."""
    state = Autocast(device, enabled, dtype or torch.get_autocast_dtype(device))
    for node in graph.nodes:
        node.meta[REGION] = {device: state} | node.meta.get(REGION, {})


def with_casts(graph: fx.Graph, leaves: frozenset[str]) -> fx.Graph:
    """The graph with a cast before every input that autocast casts, for the state of this thread and inner regions.

    A cast of a leaf (placeholders named in `leaves`) is marked `LEAF_CAST`. Raises CaptureError for an op that autocast
    changes in a way that casts of its inputs do not explain.
    """
    made: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for source, dtype in _casts(node).items():
            with graph.inserting_before(node):
                node.replace_input_with(source, _cast(graph, node, source, dtype, leaves, made))
    return graph


def _cast(
    graph: fx.Graph,
    reader: fx.Node,
    source: fx.Node,
    dtype: torch.dtype,
    leaves: frozenset[str],
    made: dict[tuple[fx.Node, torch.dtype], fx.Node],
) -> fx.Node:
    if (source, dtype) in made and not _changed_in_place(source):
        return made[source, dtype]
    cast = graph.call_function(torch.ops.aten.to.dtype, (source, dtype))
    cast.meta = copy.copy(reader.meta) | {"val": source.meta["val"].to(dtype), LEAF_CAST: source.name in leaves}
    made[source, dtype] = cast
    return cast


def _changed_in_place(source: fx.Node) -> bool:
    return any(
        isinstance(user.target, torch._ops.OpOverload) and user.target._schema.is_mutable and user.args[:1] == (source,)
        for user in source.users
    )


def _casts(node: fx.Node) -> Mapping[fx.Node, torch.dtype]:
    """The inputs of a call that autocast casts, and to what."""
    target: Any = node.target
    tensors = {a: a.meta["val"] for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)}
    if not tensors or target._schema.is_mutable:
        return {}
    device = next(iter(tensors.values())).device.type
    state: Autocast = node.meta.get(REGION, {}).get(device) or ambient(device)
    if not state.enabled or not any(x.is_floating_point() for x in tensors.values()):
        return {}
    given = pytree.tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (node.args, dict(node.kwargs)))
    casts: dict[fx.Node, torch.dtype] = {}
    if torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), f"Autocast{device.upper()}"):
        with torch.no_grad(), torch.autocast(device, state.dtype), _Observed() as observed:
            target(*given[0], **given[1])
        casts = {a: observed.casts[id(x)] for a, x in tensors.items() if id(x) in observed.casts}
    wanted = _dtypes(node.meta["val"])
    if _explained(node, casts) == wanted:
        return casts
    # An op of several others, some of which autocast knows, such as einsum.
    everything = {a: wanted[0] for a, x in tensors.items() if x.is_floating_point() and x.dtype != wanted[0]}
    if _explained(node, everything) == wanted:
        return everything
    raise CaptureError(
        f"{target._schema.name} {origin(node)}: under autocast to {state.dtype} this op returns {wanted}, computed in "
        "several dtypes that cannot be told apart. Put it into `with torch.autocast(..., enabled=False):`."
    )


def _explained(node: fx.Node, casts: Mapping[fx.Node, torch.dtype]) -> list[torch.dtype]:
    """The dtypes that the call returns without autocast, from inputs that are cast."""
    target: Any = node.target

    def value(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        x = argument.meta["val"]
        return x.to(casts[argument]) if argument in casts else x

    args, kwargs = pytree.tree_map(value, (node.args, dict(node.kwargs)))
    device = next(x.device.type for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    try:
        with torch.no_grad(), without_autocast(device):
            return _dtypes(target(*args, **kwargs))
    except RuntimeError:  # without autocast these dtypes do not go together
        return []


def _dtypes(value: Any) -> list[torch.dtype]:
    return [x.dtype for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


class _Observed(TorchDispatchMode):
    """Notes the first cast of every tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: dict[int, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = (kwargs or {}).get("dtype")
        if func is torch.ops.aten._to_copy.default and dtype is not None:
            self.casts.setdefault(id(args[0]), dtype)
        return func(*args, **(kwargs or {}))
