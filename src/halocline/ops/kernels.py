"""The kernels of convolution: the same values as `torch.convolution` gives, by the faster of the kernels torch has.

In fp32 on a CPU oneDNN's are the fast ones. torch passes them by for a pointwise convolution in a process of one
thread, where a matrix product takes twice as long, and for one small sample, where its own kernel in 3-D takes up to
ten times as long. A rank has one thread and small parts more often than a process that holds everything.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[Any, ...]  # of torch.convolution: stride, padding, dilation, transposed, output padding, groups
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]

_SMALL = 20480  # elements, not counting the last dim, up to which torch takes its own kernel for one sample
_WIDE = 1024  # channels from which on oneDNN's weight gradient of few points falls behind


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> Tensor:
    """As `torch.convolution`; `x` has a batch dim."""
    stride, padding, dilation, transposed, _, groups = arguments
    if _may_use_onednn(x) and not transposed:
        return torch.ops.aten.mkldnn_convolution(x, weight, bias, padding, stride, dilation, groups)  # type: ignore[no-any-return]
    return torch.convolution(x, weight, bias, *arguments)


def convolution_grads(
    grad: Tensor, x: Tensor, weight: Tensor, arguments: Arguments, wanted: tuple[bool, bool, bool]
) -> Grads:
    """The gradients of `x`, `weight` and bias, where `wanted`."""
    stride, _, dilation, transposed, _, groups = arguments
    if not _may_use_onednn(x) or transposed:
        return _backward(grad, x, weight, arguments, wanted)
    if x.dim() == 5 and groups == 1 and len(x) == 1 and x.shape[:4].numel() <= _SMALL:
        return _small_backward(grad, x, weight, arguments, wanted)
    if prod(weight.shape[2:]) > 1 or torch.get_num_threads() > 1 or max(*stride, *dilation) > 1:
        return _backward(grad, x, weight, arguments, wanted)
    # torch never takes a matrix product where there is dilation, which makes no difference to a kernel of one point.
    dilated = (*arguments[:2], [2] * len(dilation), *arguments[3:])
    if wanted[0] and x.shape[1] >= _WIDE and x.numel() < x.shape[1] ** 2:
        (x_grad, _, _) = _backward(grad, x, weight, dilated, (True, False, False))
        return x_grad, *_backward(grad, x, weight, arguments, (False, *wanted[1:]))[1:]
    return _backward(grad, x, weight, dilated, wanted)


def _may_use_onednn(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.dim() > 3 and torch._C._get_mkldnn_enabled()


def _backward(grad: Tensor, x: Tensor, weight: Tensor, arguments: Arguments, wanted: tuple[bool, bool, bool]) -> Grads:
    biases = [weight.shape[0]] if wanted[2] else None
    grads: Grads = torch.ops.aten.convolution_backward(grad, x, weight, biases, *arguments, wanted)
    return grads


def _small_backward(
    grad: Tensor, x: Tensor, weight: Tensor, arguments: Arguments, wanted: tuple[bool, bool, bool]
) -> Grads:
    """By oneDNN, which torch takes for tensors in oneDNN's own format whatever their size."""
    grads = _backward(grad.to_mkldnn(), x.to_mkldnn(), weight, arguments, wanted)
    x_grad, weight_grad, bias_grad = (g.to_dense() if g is not None and g.is_mkldnn else g for g in grads)
    if x_grad is not None and x.is_contiguous(memory_format=torch.channels_last_3d):
        x_grad = x_grad.contiguous(memory_format=torch.channels_last_3d)
    return x_grad, weight_grad, bias_grad
