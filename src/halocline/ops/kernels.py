"""The kernels of convolution: the same values as `torch.convolution` gives, by the faster of the kernels torch has."""

from typing import Any

import torch
from torch import Tensor

Arguments = tuple[Any, ...]  # of torch.convolution: stride, padding, dilation, transposed, output padding, groups
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]

_WIDE = 1024  # channels from which on oneDNN's weight gradient of few points falls behind


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> Tensor:
    """As `torch.convolution`; `x` has a batch dim."""
    return torch.convolution(x, weight, bias, *_by_onednn(x, weight, arguments))


def convolution_grads(
    grad: Tensor, x: Tensor, weight: Tensor, arguments: Arguments, wanted: tuple[bool, bool, bool]
) -> Grads:
    """The gradients of `x`, `weight` and bias, where `wanted`."""
    chosen = _by_onednn(x, weight, arguments)
    if chosen is not arguments and wanted[0] and wanted[1] and _has_few_points(x):
        (x_grad, _, _) = _backward(grad, x, weight, chosen, (True, False, False))
        return x_grad, *_backward(grad, x, weight, arguments, (False, *wanted[1:]))[1:]
    return _backward(grad, x, weight, chosen, wanted)


def _backward(grad: Tensor, x: Tensor, weight: Tensor, arguments: Arguments, wanted: tuple[bool, bool, bool]) -> Grads:
    biases = [weight.shape[0]] if wanted[2] else None
    grads: Grads = torch.ops.aten.convolution_backward(grad, x, weight, biases, *arguments, wanted)
    return grads


def _by_onednn(x: Tensor, weight: Tensor, arguments: Arguments) -> Arguments:
    """`arguments` with which torch takes oneDNN's kernel for a pointwise convolution by a process of one thread.

    It would take a matrix product, which is half as fast here; but never for a dilated convolution, and how far
    apart the points of a kernel of a single point are makes no difference.
    """
    stride, padding, dilation, transposed, *rest = arguments
    if (
        all(size == 1 for size in weight.shape[2:])
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and not transposed
        and all(step == 1 for step in (*stride, *dilation))
        and torch.get_num_threads() == 1
    ):
        return stride, padding, [2] * len(dilation), transposed, *rest
    return arguments


def _has_few_points(x: Tensor) -> bool:
    return x.shape[1] >= _WIDE and x.numel() < x.shape[1] ** 2
