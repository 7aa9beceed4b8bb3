"""Softmax, its logarithm, and the logarithm of summed exponentials, over dims that may be split."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import Node
from .call_op import call_op
from .reduce import kept_shape, reduced_dims, reduced_indices, reduced_signature, reduction_example, wide
from .rule import Call, Example, Reduction, Signature, StagedRule, Stages, index_names, register, torch_op


class Softmax(StagedRule):
    """The maximum of all ranks is taken off before exponentials are summed; backward there is one sum.

    Where a rank holds the whole dim it uses torch's kernel, and passes on only what ranks without a part expect.
    """

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        return Signature(dict(zip(names, node.type.shape)), (names,), names)

    def reductions(self, node: Node) -> tuple[Reduction, ...]:
        over = reduced_indices(node)
        return Reduction("max", over), Reduction("sum", over)

    def grad_reductions(self, node: Node) -> tuple[Reduction, ...]:
        return (Reduction("sum", reduced_indices(node)),)

    def forward_stages(self, call: Call, inputs: Sequence[Tensor]) -> Stages:
        (x,) = inputs
        dtype = wide(call.node.type.dtype)
        dims, logarithm = reduced_dims(call.node), "log" in call.node.op
        partial = x.new_full(kept_shape(call), float("-inf"), dtype=dtype)
        if _is_whole(call):
            yield partial
            yield torch.zeros_like(partial)
            output = call_op(call.node, inputs)
        else:
            x = x.to(dtype)
            maximum = yield x.amax(dims, keepdim=True) if x.numel() else partial
            x = x - maximum
            exponentials = x.exp() if logarithm else x.exp_()
            total = yield exponentials.sum(dims, keepdim=True)
            output = (x.sub_(total.log()) if logarithm else exponentials.div_(total)).to(call.node.type.dtype)
        return output, output if call.wanted[0] else None

    def backward_stages(self, call: Call, saved: Any, grad: Tensor) -> Stages:
        output, dims = saved, reduced_dims(call.node)
        logarithm = "log" in call.node.op
        dtype, result_dtype = wide(output.dtype), call.node.input_types[0].dtype
        if _is_whole(call):
            yield output.new_zeros(kept_shape(call), dtype=dtype)
            backward = torch_op("_log_softmax_backward_data" if logarithm else "_softmax_backward_data")
            return (backward(grad, output, dims[0] if dims else 0, output.dtype).to(result_dtype),)
        grad = grad.to(dtype)
        if logarithm:
            total = yield grad.sum(dims, keepdim=True)
            return (torch.addcmul(grad, output.to(dtype).exp_(), total, value=-1).to(result_dtype),)
        weighted = grad * output
        total = yield weighted.sum(dims, keepdim=True)
        return (weighted.addcmul_(output.to(dtype), total, value=-1).to(result_dtype),)

    def example(self, rng: random.Random) -> Example:
        x = torch.randn([rng.randint(1, 6) for _ in range(rng.randint(0, 5))], dtype=torch.float64)
        x = x * rng.choice((1, 10)) + rng.choice((0, 1000))
        dim = rng.randrange(-max(x.dim(), 1), max(x.dim(), 1))
        if rng.random() < 0.3:
            return Example(torch_op(rng.choice(("_softmax", "_log_softmax"))).default, (x, dim, False))
        dtype = torch.float64 if rng.random() < 0.3 else None
        return Example(torch_op(rng.choice(("softmax", "log_softmax"))).int, (x, dim, dtype))


class LogSumExp(StagedRule):
    """Like softmax, staged into a maximum and a sum."""

    def signature(self, node: Node) -> Signature:
        return reduced_signature(node)

    def reductions(self, node: Node) -> tuple[Reduction, ...]:
        over = reduced_indices(node)
        return Reduction("max", over), Reduction("sum", over)

    def forward_stages(self, call: Call, inputs: Sequence[Tensor]) -> Stages:
        dims, dtype = reduced_dims(call.node), wide(call.node.type.dtype)
        x = inputs[0].to(dtype)
        empty = any(x.shape[dim] == 0 for dim in dims)
        maximum = yield x.new_full(kept_shape(call), float("-inf")) if empty else x.amax(dims, keepdim=True).clone()
        maximum.masked_fill_(maximum.isinf(), 0.0)  # infinity less infinity is not a number
        total = yield (x - maximum).exp_().sum(dims, keepdim=True)
        result = total.log_().add_(maximum)
        saved = (inputs[0], result) if call.wanted[0] else None
        return result.to(call.node.type.dtype).reshape(call.writes.shape), saved

    def backward_stages(self, call: Call, saved: Any, grad: Tensor) -> Stages:
        yield from ()
        x, result = saved
        weights = (x.to(result.dtype) - result).exp_()
        return (weights.mul_(grad.reshape(kept_shape(call)).to(result.dtype)).to(x.dtype),)

    def example(self, rng: random.Random) -> Example:
        return reduction_example(rng, "logsumexp")


def _is_whole(call: Call) -> bool:
    """Whether this rank holds all of the dim: the others that take part, if any, hold nothing of it."""
    shape = call.node.type.shape
    return all(call.reads[0].shape[dim] == shape[dim] for dim in reduced_dims(call.node))


register(Softmax(), "softmax", "log_softmax", "_softmax", "_log_softmax", "special_softmax", "special_log_softmax")
register(LogSumExp(), "logsumexp", "special_logsumexp")
