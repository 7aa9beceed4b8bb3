"""Maps and sums that differ by channel only, by torch's own one-pass kernels in the tensor's memory format.

What batch norm, group norm and instance norm share: all of them scale and shift a channel (of a sample).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .blocks import Slices, block_count, blocks
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
    """What standardises a channel: [C], the same for all samples, or [N, C], of each sample."""

    mean: Tensor
    variance: Tensor
    eps: float

    @cached_property
    def rstd(self) -> Tensor:
        return (self.variance + self.eps).rsqrt()

    def put(self, x: Tensor, weight: Tensor, bias: Tensor, output: Tensor) -> None:
        """`(x - mean) / sqrt(variance + eps) * weight + bias` of dense `x` [N, C, ...] into `output`, in one pass."""
        unused, kernel = self.mean.new_empty(0), torch_op("native_batch_norm").out
        statistics = weight, bias, self.mean, self.variance
        for (part, values), (out, _) in zip(_as_channels(x, statistics), _as_channels(output, statistics)):
            kernel(part, *values, False, 0.0, self.eps, out=out, save_mean=unused, save_invstd=unused)

    def blocks(self, x: Tensor) -> Iterator[tuple[Slices | None, slice, "Standard"]]:
        """The blocks of `x` in which several kernels may follow each other, with their channels; None is all of it."""
        if self.mean.dim() > 1 or block_count(x) <= 1:
            yield None, slice(None), self
            return
        for block in blocks(x):
            own = block[1]
            yield block, own, Standard(self.mean[own], self.variance[own], self.eps)


def standardised(x: Tensor, standard: Standard, weight: Tensor, bias: Tensor, relu: bool = False) -> Tensor:
    """`(x - mean) / sqrt(variance + eps) * weight + bias`, and ReLU of that if asked for, in one pass."""
    x = dense_like(x, x)
    output = torch.empty_like(x)
    if not relu:
        standard.put(x, weight, bias, output)
        return output
    for block, own, part in standard.blocks(x):
        result = _of(block, output)
        part.put(_of(block, x), weight[own], bias[own], result)
        result.relu_()
    return output


def gradient_sums(grad: Tensor, x: Tensor, standard: Standard) -> Tensor:
    """Sums [2, C] (or [2, N, C]) over space of `grad` and of `grad * (x - mean) * rstd`.

    One pass over both `grad` and `x` [N, C, ...].
    """
    statistics = standard.mean, standard.rstd
    grad, x = dense_like(grad, x), dense_like(x, x)
    backward = torch_op("native_batch_norm_backward")
    sums = []
    for (part, values), (grad_part, _) in zip(_as_channels(x, statistics), _as_channels(grad, statistics)):
        _, scaled, plain = backward(grad_part, part, None, None, None, *values, True, 0.0, [False, True, True])
        sums.append(torch.stack([plain, scaled]))
    if not sums:
        return standard.mean.new_zeros(2, *standard.mean.shape)
    return sums[0].view(2, *standard.mean.shape) if len(sums) == 1 else torch.stack(sums, 1)


def masked_gradient_sums(grad: Tensor, output: Tensor, x: Tensor, standard: Standard) -> tuple[Tensor, Tensor]:
    """`grad` where the `output` of a ReLU is positive, else zero, and the `gradient_sums` of that, in one pass."""
    x, masked = dense_like(x, x), torch.empty_like(output)
    mask = torch_op("threshold_backward").grad_input
    sums = None
    for block, own, part in standard.blocks(x):
        result = _of(block, masked)
        mask(_of(block, grad), _of(block, output), 0, grad_input=result)
        found = gradient_sums(result, _of(block, x), part)
        if block is None:
            return masked, found
        sums = standard.mean.new_zeros(2, *standard.mean.shape) if sums is None else sums
        sums[:, own] += found
    assert sums is not None
    return masked, sums


def through_statistics(
    grad: Tensor, x: Tensor, standard: Standard, scale: Tensor, slope: Tensor, shift: Tensor, overwrite: bool = False
) -> Tensor:
    """`scale * grad + slope * (x - mean) / sqrt(variance + eps) + shift`, in one pass, into `grad` if `overwrite`.

    The gradient of `x` [N, C, ...], which was normalised with its own statistics. The factors are as those.
    """
    scale = scale.view(-1 if scale.dim() == 1 else len(x), *scale.shape[1:], *(1,) * (x.dim() - 2))
    grad, x = dense_like(grad, x), dense_like(x, x)
    result = grad if overwrite else torch.empty_like(x)
    for block, own, part in standard.blocks(x):
        added = torch.empty_like(_of(block, x)) if overwrite else _of(block, result)
        part.put(_of(block, x), slope[own], shift[own], added)
        factors = scale if block is None else scale[own]
        torch.addcmul(added, _of(block, grad), factors, out=_of(block, result))
    return result


def _of(block: Slices | None, x: Tensor) -> Tensor:
    return x if block is None else x[block]


def _as_channels(x: Tensor, statistics: Sequence[Tensor]) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
    """Views of `x` such that each channel of a view has one value, with these values of all `statistics`."""
    if x.numel() == 0:
        return
    if statistics[0].dim() == 1:
        yield x, statistics
    elif x.is_contiguous():
        yield x.view(1, -1, *x.shape[2:]), [values.reshape(-1) for values in statistics]
    else:
        yield from ((x[n : n + 1], [values[n] for values in statistics]) for n in range(len(x)))
