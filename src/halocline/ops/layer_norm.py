"""Layer norm and RMS norm over the last dims, which may be split like the others."""

import random
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..graph import Node
from .channels import statistics_dtype
from .moments import local_moments
from .rule import Call, Example, Reduction, Signature, StagedRule, Stages, index_names, register, torch_op


class LayerNorm(StagedRule):
    """Moments of the normalised dims, merged by Chan et al. (1979); backward there is one sum.

    Where a rank holds them whole it uses torch's kernel, and passes on only what ranks without a part expect.
    """

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        last = names[-len(node["normalized_shape"]) :]
        return Signature(dict(zip(names, node.type.shape)), (names, *(last for _ in node.inputs[1:])), names)

    def reductions(self, node: Node) -> tuple[Reduction, ...]:
        return (Reduction("moments", _normalised_names(node)),)

    def grad_reductions(self, node: Node) -> tuple[Reduction, ...]:
        return (Reduction("sum", _normalised_names(node)),)

    def forward_stages(self, call: Call, inputs: Sequence[Tensor]) -> Stages:
        x, dims, eps = inputs[0], _dims(call), call["eps"]
        weight, bias = call.given(inputs, "weight"), call.given(inputs, "bias")
        if _is_whole(call):
            yield x.new_zeros(3, *_kept_shape(call), dtype=torch.float64)
            output, mean, rstd = torch_op("native_layer_norm")(x, call["normalized_shape"], weight, bias, eps)
            return output, (x, weight, bias, mean, rstd) if any(call.wanted) else None
        count, mean, squares = yield local_moments(x, dims)
        dtype = statistics_dtype(x)
        rstd = (squares / count.clamp(min=1) + eps).rsqrt()
        mean, rstd = mean.to(dtype), rstd.to(dtype)
        output = (x - mean).mul_(rstd)
        if weight is not None:
            output.mul_(weight)
        if bias is not None:
            output.add_(bias)
        return output.to(x.dtype), (x, weight, bias, mean, rstd) if any(call.wanted) else None

    def backward_stages(self, call: Call, saved: Any, grad: Tensor) -> Stages:
        x, weight, bias, mean, rstd = saved
        dims = _dims(call)
        mask = [role in call.named and call.wanted[call.named[role]] for role in ("input", "weight", "bias")]
        if _is_whole(call):
            yield x.new_zeros(2, *_kept_shape(call), dtype=statistics_dtype(x))
            backward = torch_op("native_layer_norm_backward")
            found = backward(grad, x, call["normalized_shape"], mean, rstd, weight, bias, mask)
        else:
            xhat = (x - mean).mul_(rstd)
            inner = grad.to(xhat.dtype) if weight is None else grad * weight.to(xhat.dtype)
            total = yield torch.stack([inner.sum(dims, keepdim=True), (inner * xhat).sum(dims, keepdim=True)])
            shift, slope = total / prod(call["normalized_shape"])
            rows = tuple(dim for dim in range(x.dim()) if dim not in dims)
            wide = grad.to(xhat.dtype)
            grad_weight = (wide * xhat).sum(rows) if rows else wide * xhat
            grad_bias = wide.sum(rows) if rows else wide
            grad_x = (inner - shift).sub_(xhat.mul_(slope)).mul_(rstd)
            found = (grad_x, grad_weight, grad_bias)
        return _by_role(call, dict(zip(("input", "weight", "bias"), found)))

    def example(self, rng: random.Random) -> Example:
        x, shape = _example_input(rng)
        weight = torch.rand(shape, dtype=torch.float64) if rng.random() < 0.7 else None
        bias = torch.rand(shape, dtype=torch.float64) if weight is not None and rng.random() < 0.8 else None
        return Example(torch_op("layer_norm").default, (x, shape, weight, bias, rng.choice((1e-5, 1e-2)), True))


class RmsNorm(StagedRule):
    """The mean square of the normalised dims is summed over ranks; backward there is one more sum."""

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        last = names[-len(node["normalized_shape"]) :]
        return Signature(dict(zip(names, node.type.shape)), (names, *(last for _ in node.inputs[1:])), names)

    def reductions(self, node: Node) -> tuple[Reduction, ...]:
        return (Reduction("sum", _normalised_names(node)),)

    def grad_reductions(self, node: Node) -> tuple[Reduction, ...]:
        return (Reduction("sum", _normalised_names(node)),)

    def forward_stages(self, call: Call, inputs: Sequence[Tensor]) -> Stages:
        x, weight = inputs[0], call.given(inputs, "weight")
        dtype = statistics_dtype(x)
        eps = torch.finfo(dtype).eps if call["eps"] is None else call["eps"]
        total = yield x.to(dtype).square().sum(_dims(call), keepdim=True)
        rrms = (total / prod(call["normalized_shape"]) + eps).rsqrt()
        output = x * rrms
        if weight is not None:
            output.mul_(weight)
        return output.to(x.dtype), (x, weight, rrms) if any(call.wanted) else None

    def backward_stages(self, call: Call, saved: Any, grad: Tensor) -> Stages:
        x, weight, rrms = saved
        dims = _dims(call)
        xhat, wide = x * rrms, grad.to(rrms.dtype)
        inner = wide if weight is None else wide * weight
        total = yield (inner * xhat).sum(dims, keepdim=True)
        rows = tuple(dim for dim in range(x.dim()) if dim not in dims)
        grad_weight = (wide * xhat).sum(rows) if rows else wide * xhat
        slope = total / prod(call["normalized_shape"])
        grad_x = (inner - xhat * slope).mul_(rrms)
        return _by_role(call, {"input": grad_x, "weight": grad_weight})

    def example(self, rng: random.Random) -> Example:
        x, shape = _example_input(rng)
        weight = torch.rand(shape, dtype=torch.float64) if rng.random() < 0.7 else None
        return Example(torch_op("rms_norm").default, (x, shape, weight, rng.choice((None, 1e-5, 1e-2))))


def _dims(call: Call) -> tuple[int, ...]:
    """The dims that are normalised over."""
    rank = len(call.node.type.shape)
    return tuple(range(rank - len(call["normalized_shape"]), rank))


def _normalised_names(node: Node) -> tuple[str, ...]:
    return index_names(len(node.type.shape))[-len(node["normalized_shape"]) :]


def _is_whole(call: Call) -> bool:
    """Whether this rank holds all of the normalised dims: the others that take part, if any, hold nothing of them."""
    return all(call.reads[0].shape[dim] == call.node.type.shape[dim] for dim in _dims(call))


def _kept_shape(call: Call) -> tuple[int, ...]:
    dims = _dims(call)
    return tuple(1 if dim in dims else size for dim, size in enumerate(call.reads[0].shape))


def _by_role(call: Call, found: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients that are wanted, in the order and with the dtypes of the node's inputs."""
    types = call.node.input_types
    return tuple(
        found[role].to(type.dtype) if want else None for role, type, want in zip(call.node.roles, types, call.wanted)
    )


def _example_input(rng: random.Random) -> tuple[Tensor, list[int]]:
    x = torch.randn([rng.randint(1, 6) for _ in range(rng.randint(1, 5))], dtype=torch.float64)
    return x * rng.choice((1, 5)) + rng.choice((0, 0, 30)), list(x.shape[-rng.randint(1, x.dim()) :])


register(LayerNorm(), "layer_norm")
register(RmsNorm(), "rms_norm")
