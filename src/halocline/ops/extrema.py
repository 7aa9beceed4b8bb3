"""Maxima and minima over dims: their values, whose gradient is shared by ties, and where they lie."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import Node
from .reduce import kept_shape, reduced_dims, reduced_indices, reduced_signature, reduction_example
from .rule import Call, Example, Reduction, Signature, StagedRule, Stages, register


def is_maximum(node: Node) -> bool:
    """Whether the node asks for the largest element: `aminmax` gives the smallest first."""
    return node.output == 1 if node.op == "aminmax" else "max" in node.op


def lowest(dtype: torch.dtype, maximum: bool) -> float | int | bool:
    """The neutral element of the maximum, or of the minimum, of values of `dtype`."""
    if dtype == torch.bool:
        return not maximum
    if dtype.is_floating_point:
        return float("-inf") if maximum else float("inf")
    return torch.iinfo(dtype).min if maximum else torch.iinfo(dtype).max


class Extremum(StagedRule):
    """The largest or smallest value. Its gradient is divided evenly between equal elements, on whichever ranks."""

    def signature(self, node: Node) -> Signature:
        return reduced_signature(node)

    def reductions(self, node: Node) -> tuple[Reduction, ...]:
        return (Reduction("max" if is_maximum(node) else "min", reduced_indices(node)),)

    def grad_reductions(self, node: Node) -> tuple[Reduction, ...]:
        return (Reduction("sum", reduced_indices(node)),)

    def forward_stages(self, call: Call, inputs: Sequence[Tensor]) -> Stages:
        (x,) = inputs
        maximum, dims = is_maximum(call.node), reduced_dims(call.node)
        if any(x.shape[dim] == 0 for dim in dims):
            partial = x.new_full(kept_shape(call), lowest(x.dtype, maximum))
        else:
            partial = (x.amax if maximum else x.amin)(dims, keepdim=True).clone()
        result = yield partial
        return result.reshape(call.writes.shape), (x, result) if call.wanted[0] else None

    def backward_stages(self, call: Call, saved: Any, grad: Tensor) -> Stages:
        x, result = saved
        equal = x == result
        ties = yield equal.sum(reduced_dims(call.node), keepdim=True)
        return (equal * (grad.reshape(kept_shape(call)) / ties),)

    def example(self, rng: random.Random) -> Example:
        return reduction_example(rng, rng.choice(("amax", "amin", "max", "min", "aminmax")))


class Where(StagedRule):
    """Where the largest or smallest element lies: of equal ones, the first, which also gets the whole gradient."""

    def signature(self, node: Node) -> Signature:
        return reduced_signature(node)

    def reductions(self, node: Node) -> tuple[Reduction, ...]:
        over = reduced_indices(node)
        return Reduction("max" if is_maximum(node) else "min", over), Reduction("min", over)

    def forward_stages(self, call: Call, inputs: Sequence[Tensor]) -> Stages:
        (x,) = inputs
        maximum = is_maximum(call.node)
        values = x.new_full(kept_shape(call), lowest(x.dtype, maximum))
        places = torch.full_like(values, call.node.input_types[0].numel, dtype=torch.int64)
        if x.numel():
            values, places = _first(call, x, maximum)
        best = yield values.clone()
        place = yield torch.where((values == best) | (values != values), places, call.node.input_types[0].numel)
        output = best if call.node.op in ("max", "min") and call.node.output == 0 else place
        return output.reshape(call.writes.shape), place if call.wanted[0] else None

    def backward_stages(self, call: Call, saved: Any, grad: Tensor) -> Stages:
        yield from ()
        (dim,) = reduced_dims(call.node) or (0,)
        shape = call.reads[0].shape
        result = grad.new_zeros(shape)
        if not shape:
            return (grad.clone(),)
        if result.numel():
            place = saved - call.reads[0].intervals[dim][0]
            mine = (place >= 0) & (place < shape[dim])
            result.scatter_(dim, place.clamp(0, shape[dim] - 1), grad.reshape(kept_shape(call)) * mine)
        return (result,)

    def example(self, rng: random.Random) -> Example:
        return reduction_example(rng, rng.choice(("max.dim", "min.dim", "max.dim", "argmax", "argmin")))


def _first(call: Call, x: Tensor, maximum: bool) -> tuple[Tensor, Tensor]:
    """The rank's best values (dims kept), and their first place in the whole dim, or in the whole flattened tensor."""
    dim = call.node.attrs.get("dim")
    if dim is not None or not x.dim():
        along = int(dim or 0)
        values, places = (x.max if maximum else x.min)(along, keepdim=True)
        return values, places + (call.reads[0].intervals[along][0] if x.dim() else 0)
    flat = x.reshape(-1)
    values, local = (flat.max if maximum else flat.min)(0)
    place, stride = torch.zeros_like(local), 1
    for size, (start, _), whole in zip(
        reversed(x.shape), reversed(call.reads[0].intervals), reversed(call.node.input_types[0].shape)
    ):
        place = place + (local % size + start) * stride
        local, stride = local // size, stride * whole
    shape = kept_shape(call)
    return values.reshape(shape), place.reshape(shape)


register(Extremum(), "amax", "amin", "max.default", "min.default", "aminmax")
register(Where(), "max.dim", "min.dim", "argmax", "argmin")
