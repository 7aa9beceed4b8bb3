"""Blocks of a tensor that fit a core's cache: where several kernels follow each other, memory is then read once."""

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_BYTES = 2 << 20  # of one thread

Slices = tuple[slice, ...]


def outermost(x: Tensor) -> int:
    """The dim along which `x` lies farthest apart in memory."""
    return max(range(x.dim()), key=lambda dim: (x.shape[dim] > 1, x.stride(dim), -dim))


def block_count(x: Tensor) -> int:
    """In how many blocks `x` is to be taken, counting what is narrower as fp32; one where there is no such cache."""
    if x.device.type != "cpu":
        return 1
    return -(-x.numel() * max(x.element_size(), 4) // (BLOCK_BYTES * torch.get_num_threads()))


def blocks(x: Tensor) -> Iterator[Slices]:
    """The slices of `x`, cut along its outermost dims first: the blocks of a dense tensor are dense."""
    count = block_count(x)
    if count <= 1:
        yield (slice(None),) * x.dim()
        return
    dim = outermost(x)
    start = 0
    for part in x.tensor_split(min(count, x.shape[dim]), dim):
        for inner in blocks(part):
            first, last, _ = inner[dim].indices(part.shape[dim])
            yield (*inner[:dim], slice(start + first, start + last), *inner[dim + 1 :])
        start += part.shape[dim]
