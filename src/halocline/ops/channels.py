"""Maps and sums that differ by channel only, by torch's own one-pass kernels in the tensor's memory format.

What batch norm, group norm and instance norm share: all of them scale and shift a channel (of a sample).
"""

import torch
from torch import Tensor

from .rule import torch_op


def statistics_dtype(x: Tensor) -> torch.dtype:
    """In what statistics and per-channel factors of `x` are computed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def dense_like(x: Tensor, other: Tensor) -> Tensor:
    """`x` [N, C, ...] without gaps in the memory order of `other`: the kernels are slow on anything else."""
    channels_last = other.dim() in (4, 5) and other.stride(1) == 1 and other.shape[1] > 1
    if not channels_last:
        return x.contiguous()
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def along_channels(values: Tensor, x: Tensor) -> Tensor:
    """`values` [C] in the shape that broadcasts against `x` [N, C, ...]."""
    return values.view(-1, *(1,) * (x.dim() - 2))


def standardised(x: Tensor, mean: Tensor, variance: Tensor, eps: float, weight: Tensor, bias: Tensor) -> Tensor:
    """`(x - mean) / sqrt(variance + eps) * weight + bias` in one pass; all but `x` [N, C, ...] are [C]."""
    if x.numel() == 0:
        return torch.empty_like(x)
    return torch.batch_norm(dense_like(x, x), weight, bias, mean, variance, False, 0.0, eps, False)


def gradient_sums(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Sums [2, C] over all but channels of `grad`, and of `grad * (x - mean) * rstd`, in one pass over both."""
    if x.numel() == 0:
        return mean.new_zeros(2, x.shape[1])
    backward = torch_op("native_batch_norm_backward")
    _, scaled, plain = backward(
        dense_like(grad, x), dense_like(x, x), None, None, None, mean, rstd, True, 0.0, [False, True, True]
    )
    return torch.stack([plain, scaled])


def through_statistics(
    grad: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float, scale: Tensor, means: Tensor
) -> Tensor:
    """`scale * (grad - means[0] - xhat * means[1])` with `xhat = (x - mean) / sqrt(variance + eps)`, in two passes.

    The gradient of what was normalised with its own statistics; `means` [2, C] are those of `grad` and `grad * xhat`.
    """
    inner = standardised(x, mean, variance, eps, -scale * means[1], -scale * means[0])
    return inner.addcmul_(dense_like(grad, x), along_channels(scale, x))
