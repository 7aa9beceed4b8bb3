"""Moments: rows `(count, mean, sum of squared deviations)` in fp64, taken of a part and merged over the parts."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

BLOCK_BYTES = 2 << 20  # what one thread reads before it reads it again: it should still be in the cache then


def merge_moments(rows: Tensor) -> Tensor:
    """The moments [3, ...] of all parts together, from the moments [P, 3, ...] of each; parts may be empty.

    Chan, Golub and LeVeque (1979): deviations are taken from the common mean, so nothing cancels where the mean is
    large beside the deviation. Parts without elements hold `(0, 0, 0)`; so does the result if all are empty.
    """
    counts, means, squares = rows.unbind(1)
    count = counts.sum(0)
    weights = counts / count.clamp(min=1)
    mean = (weights * means).sum(0)
    return torch.stack([count, mean, (squares + counts * (means - mean).square()).sum(0)])


def local_moments(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The moments [3, ...] of `x` over `dims` (kept, of size 1), in fp64; `(0, 0, 0)` where there is no element.

    Reads memory once: blocks that fit the cache are summed, shifted by their mean and summed again, whatever the
    memory format, and their moments merged. That is also more precise than one pass over all elements.
    """
    if x.numel() == 0 or not dims:
        return _of_points(x, dims)
    if x.device.type != "cpu":
        wide = x if x.dtype == torch.float64 else x.float()
        variance, mean = torch.var_mean(wide, tuple(dims), correction=0, keepdim=True)
        count = prod(x.shape[dim] for dim in dims)
        return torch.stack([torch.full_like(mean, count), mean, variance * count]).double()
    block_bytes = BLOCK_BYTES * torch.get_num_threads()
    blocks = -(-x.numel() * max(x.element_size(), 4) // block_bytes)
    if blocks == 1:
        return _of_block(x, tuple(dims))
    outermost = max((dim for dim, size in enumerate(x.shape) if size > 1), key=lambda dim: (x.stride(dim), -dim))
    parts = x.tensor_split(min(blocks, x.shape[outermost]), outermost)
    rows = [local_moments(part, dims) for part in parts]
    return merge_moments(torch.stack(rows)) if outermost in dims else torch.cat(rows, outermost + 1)


def _of_points(x: Tensor, dims: Sequence[int]) -> Tensor:
    if dims:
        return x.new_zeros(3, *(1 if dim in dims else size for dim, size in enumerate(x.shape)), dtype=torch.float64)
    mean = x.double()
    return torch.stack([torch.ones_like(mean), mean, torch.zeros_like(mean)])


def _of_block(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    count = prod(x.shape[dim] for dim in dims)
    mean = wide.sum(dims, keepdim=True).div_(count)
    deviation = wide - mean
    rest = deviation.sum(dims, keepdim=True).double()  # what rounding left out of the mean
    squares = deviation.mul_(deviation).sum(dims, keepdim=True).double()
    shift = rest / count
    return torch.stack([torch.full_like(shift, count), mean.double() + shift, squares - rest * shift])
