"""Moments: rows `(count, mean, sum of squared deviations)` in fp64, taken of a part and merged over the parts."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from .blocks import block_count, outermost


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

    Memory is read once, whatever its format: the moments of blocks that fit the cache are taken and merged.
    """
    if x.numel() == 0 or not dims:
        return _of_points(x, dims)
    if x.device.type != "cpu":
        variance, mean = torch.var_mean(_wide(x), tuple(dims), correction=0, keepdim=True)
        count = prod(x.shape[dim] for dim in dims)
        return torch.stack([torch.full_like(mean, count), mean, variance * count]).double()
    outer, count = outermost(x), block_count(x)
    parts = x.tensor_split(min(count, x.shape[outer]), outer)
    if block_count(parts[0]) > 1:
        rows = [local_moments(part, dims) for part in parts]
    elif len(parts) == 1:
        return _of_block(x, tuple(dims))
    else:
        return _of_blocks(parts, tuple(dims), outer)
    return merge_moments(torch.stack(rows)) if outer in dims else torch.cat(rows, outer + 1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _of_points(x: Tensor, dims: Sequence[int]) -> Tensor:
    if dims:
        return x.new_zeros(3, *(1 if dim in dims else size for dim, size in enumerate(x.shape)), dtype=torch.float64)
    mean = x.double()
    return torch.stack([torch.ones_like(mean), mean, torch.zeros_like(mean)])


def _of_blocks(parts: Sequence[Tensor], dims: tuple[int, ...], outer: int) -> Tensor:
    """The moments of `parts`, which follow each other along dim `outer`, together."""
    if outer not in dims:
        sums = torch.cat([_sums(part, dims) for part in parts], outer + 1)
        return _centred(sums, prod(parts[0].shape[dim] for dim in dims))
    sums = torch.stack([_sums(part, dims) for part in parts], 1)
    counts = [prod(part.shape[dim] for dim in dims) for part in parts]
    count = torch.tensor(counts, dtype=torch.float64, device=sums.device).view(-1, *(1,) * (sums.dim() - 2))
    return merge_moments(_centred(sums, count).transpose(0, 1))


def _of_block(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return _centred(_sums(x, dims), prod(x.shape[dim] for dim in dims))


def _centred(sums: Tensor, count: Tensor | int) -> Tensor:
    """The moments of `count` elements, from their `_sums`."""
    guess, rest, squares = sums.double().unbind()
    shift = rest / count
    mean, squares = guess.add_(shift), squares.sub_(rest.mul_(shift)).clamp_(min=0)
    return torch.stack(
        [torch.full_like(mean, count) if isinstance(count, int) else count.expand_as(mean), mean, squares]
    )


def _sums(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """A guess at the mean, and the sums of the deviations from it and of their squares: [3, ...].

    The guess is the mean of a slab of the block. That costs one pass less than the exact mean, and is as safe: if the
    mean of a sixteenth of the data is far from that of the whole, so are the data, and of their squares at most four
    bits cancel.
    """
    x = _wide(x)
    outer = outermost(x)  # a slab of it lies in one piece
    along = outer if outer in dims and x.shape[outer] >= 16 else max(dims, key=lambda dim: x.shape[dim])
    guess = x.narrow(along, 0, -(-x.shape[along] // 16)).mean(dims, keepdim=True)
    deviation = x - guess
    rest = deviation.sum(dims, keepdim=True)
    return torch.stack([guess, rest, deviation.mul_(deviation).sum(dims, keepdim=True)])
