"""Maps and sums that differ by channel only, by torch's own one-pass kernels in the tensor's memory format.

What batch norm, group norm and instance norm share: all of them scale and shift a channel (of a sample).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .blocks import Slices, blocks
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


@dataclass(frozen=True)
class Standard:
    """What standardises a channel (of a sample): all [S, C], S = 1 the same for all samples, S = N of each sample."""

    mean: Tensor
    variance: Tensor
    eps: float

    @cached_property
    def rstd(self) -> Tensor:
        return (self.variance + self.eps).rsqrt()

    def put(self, x: Tensor, weight: Tensor, bias: Tensor, output: Tensor) -> None:
        """`(x - mean) / sqrt(variance + eps) * weight + bias` of dense `x` [N, C, ...] into `output`, in one pass."""
        unused = self.mean.new_empty(0)
        for (part, rows), (out, _) in zip(_as_channels(x, self.mean), _as_channels(output, self.mean)):
            statistics = [values[rows].reshape(-1) for values in (weight, bias, self.mean, self.variance)]
            kernel = torch_op("native_batch_norm").out
            kernel(part, *statistics, False, 0.0, self.eps, out=out, save_mean=unused, save_invstd=unused)

    def blocks(self, x: Tensor) -> Iterator[tuple[Slices, Slices, "Standard"]]:
        """The blocks of `x` in which several kernels may follow each other: of `x`, of what is [S, C], and of this."""
        for block in blocks(x) if len(self.mean) == 1 else [(slice(None),) * x.dim()]:
            own = slice(None), block[1]
            yield block, own, Standard(self.mean[own], self.variance[own], self.eps)


def standardised(x: Tensor, standard: Standard, weight: Tensor, bias: Tensor, relu: bool = False) -> Tensor:
    """`(x - mean) / sqrt(variance + eps) * weight + bias`, and ReLU of that if asked for, in one pass."""
    x = dense_like(x, x)
    output = torch.empty_like(x)
    if not relu:
        standard.put(x, weight, bias, output)
        return output
    for block, own, part in standard.blocks(x):
        part.put(x[block], weight[own], bias[own], output[block])
        output[block].relu_()
    return output


def gradient_sums(grad: Tensor, x: Tensor, standard: Standard) -> Tensor:
    """Sums [2, S, C] over space, and with S = 1 over samples, of `grad` and of `grad * (x - mean) * rstd`.

    One pass over both `grad` and `x` [N, C, ...].
    """
    mean, rstd = standard.mean, standard.rstd
    sums = mean.new_zeros(2, *mean.shape)
    grad, x = dense_like(grad, x), dense_like(x, x)
    for (part, rows), (grad_part, _) in zip(_as_channels(x, mean), _as_channels(grad, mean)):
        statistics = (mean[rows].reshape(-1), rstd[rows].reshape(-1))
        backward = torch_op("native_batch_norm_backward")
        _, scaled, plain = backward(grad_part, part, None, None, None, *statistics, True, 0.0, [False, True, True])
        sums[0, rows], sums[1, rows] = plain.view(-1, x.shape[1]), scaled.view(-1, x.shape[1])
    return sums


def masked_gradient_sums(grad: Tensor, output: Tensor, x: Tensor, standard: Standard) -> tuple[Tensor, Tensor]:
    """`grad` where the `output` of a ReLU is positive, else zero, and the `gradient_sums` of that, in one pass."""
    x, masked = dense_like(x, x), torch.empty_like(output)
    sums = standard.mean.new_zeros(2, *standard.mean.shape)
    for block, own, part in standard.blocks(x):
        torch_op("threshold_backward").grad_input(grad[block], output[block], 0, grad_input=masked[block])
        sums[:, *own] += gradient_sums(masked[block], x[block], part)
    return masked, sums


def through_statistics(
    grad: Tensor, x: Tensor, standard: Standard, scale: Tensor, slope: Tensor, shift: Tensor, overwrite: bool = False
) -> Tensor:
    """`scale * grad + slope * (x - mean) / sqrt(variance + eps) + shift`, in one pass, into `grad` if `overwrite`.

    The gradient of `x` [N, C, ...], which was normalised with its own statistics. The factors are [S, C].
    """
    along_channels = scale.view(*scale.shape, *(1,) * (x.dim() - 2))
    grad, x = dense_like(grad, x), dense_like(x, x)
    if not overwrite:
        result = torch.empty_like(x)
        for block, own, part in standard.blocks(x):
            part.put(x[block], slope[own], shift[own], result[block])
            result[block].addcmul_(grad[block], along_channels[own])
        return result
    for block, own, part in standard.blocks(x):
        added = torch.empty_like(x[block])
        part.put(x[block], slope[own], shift[own], added)
        torch.addcmul(added, grad[block], along_channels[own], out=grad[block])
    return grad


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
