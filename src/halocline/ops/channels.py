"""Maps and sums that differ by channel only, by torch's own one-pass kernels in the tensor's memory format.

What batch norm, group norm and instance norm share: all of them scale and shift a channel (of a sample).
"""

from collections.abc import Iterator

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


def standardised(x: Tensor, mean: Tensor, variance: Tensor, eps: float, weight: Tensor, bias: Tensor) -> Tensor:
    """`(x - mean) / sqrt(variance + eps) * weight + bias` in one pass.

    All but `x` [N, C, ...] are [S, C]: with S = 1 the same for all samples, with S = N of each sample.
    """
    x = dense_like(x, x)
    output, unused = torch.empty_like(x), mean.new_empty(0)
    for (part, rows), (out, _) in zip(_as_channels(x, mean), _as_channels(output, mean)):
        statistics = [values[rows].reshape(-1) for values in (weight, bias, mean, variance)]
        kernel = torch_op("native_batch_norm").out
        kernel(part, *statistics, False, 0.0, eps, out=out, save_mean=unused, save_invstd=unused)
    return output


def gradient_sums(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Sums [2, S, C] over space, and with S = 1 over samples, of `grad` and of `grad * (x - mean) * rstd`.

    One pass over both `grad` and `x` [N, C, ...]; `mean` and `rstd` are [S, C].
    """
    sums = mean.new_zeros(2, *mean.shape)
    grad, x = dense_like(grad, x), dense_like(x, x)
    for (part, rows), (grad_part, _) in zip(_as_channels(x, mean), _as_channels(grad, mean)):
        statistics = (mean[rows].reshape(-1), rstd[rows].reshape(-1))
        backward = torch_op("native_batch_norm_backward")
        _, scaled, plain = backward(grad_part, part, None, None, None, *statistics, True, 0.0, [False, True, True])
        sums[0, rows], sums[1, rows] = plain.view(-1, x.shape[1]), scaled.view(-1, x.shape[1])
    return sums


def through_statistics(
    grad: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float, scale: Tensor, slope: Tensor, shift: Tensor
) -> Tensor:
    """`scale * grad + slope * xhat + shift` with `xhat = (x - mean) / sqrt(variance + eps)`, in two passes.

    The gradient of what was normalised with its own statistics. All but `grad` and `x` [N, C, ...] are [S, C].
    """
    along_channels = (*scale.shape, *(1,) * (x.dim() - 2))
    return standardised(x, mean, variance, eps, slope, shift).addcmul_(dense_like(grad, x), scale.view(along_channels))


def _as_channels(x: Tensor, values: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Views of `x`, and the rows of `values` [S, C], such that each channel of a view has one value."""
    if x.numel() == 0:
        return
    if len(values) == 1:
        yield x, slice(None)
    elif x.is_contiguous():
        yield x.view(1, -1, *x.shape[2:]), slice(None)
    else:
        yield from ((x[n : n + 1], slice(n, n + 1)) for n in range(len(x)))
