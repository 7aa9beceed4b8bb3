"""Moments: rows `(count, mean, sum of squared deviations)` in fp64, taken of a part and merged over the parts."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
    """The moments [3, ...] of `x` over `dims` (kept, of size 1), in fp64; `(0, 0, 0)` where there is no element."""
    count = 1
    for dim in dims:
        count *= x.shape[dim]
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    if count == 0 or x.numel() == 0:
        return x.new_zeros(3, *shape, dtype=torch.float64)
    if not dims:
        return torch.stack([torch.ones_like(x, dtype=torch.float64), x.double(), torch.zeros_like(x).double()])
    wide = x.double() if x.dtype in (torch.bfloat16, torch.float16) else x
    variance, mean = torch.var_mean(wide, tuple(dims), correction=0, keepdim=True)
    return torch.stack([torch.full_like(mean, count, dtype=torch.float64), mean.double(), variance.double() * count])
