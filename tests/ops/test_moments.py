"""Moments: precise where the mean is large, whatever the memory order and however the data are cut."""

import pytest
import torch

from halocline.ops import blocks
from halocline.ops.moments import local_moments, merge_moments


def expected(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    variance, mean = torch.var_mean(x.double(), dims, correction=0, keepdim=True)
    return mean, variance


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dims", [(0, 2, 3), (1, 2, 3), (2, 3), (3,)])
@pytest.mark.parametrize("block_bytes", [64, 1 << 10, 2 << 20])
def test_blocks_change_nothing(
    monkeypatch: pytest.MonkeyPatch, format: torch.memory_format, dims: tuple[int, ...], block_bytes: int
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    x = torch.randn(3, 5, 7, 6, dtype=torch.float64).contiguous(memory_format=format) + 3
    count, mean, squares = local_moments(x, dims)
    torch.testing.assert_close((mean, squares / count), expected(x, dims), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("slab", [1.0, 0.0])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_variance_survives_a_large_mean(slab: float, format: torch.memory_format) -> None:
    x = torch.randn(2, 4, 64, 64, generator=torch.Generator().manual_seed(0)) + 1000
    x[:, :, :4] *= slab  # the slab that the first guess at the mean is taken from is nothing like the rest
    count, mean, squares = local_moments(x.contiguous(memory_format=format), (0, 2, 3))
    want_mean, want_variance = expected(x, (0, 2, 3))
    torch.testing.assert_close(mean, want_mean, rtol=5e-7, atol=0)
    torch.testing.assert_close(squares / count, want_variance, rtol=1e-5, atol=0)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_variance_of_many_equal_values(format: torch.memory_format) -> None:
    """Torch's kernel for channels last is off by 1e-3 here: it adds equal values up one by one, rounding alike."""
    generator = torch.Generator().manual_seed(0)
    x = torch.relu(torch.randn(1, 4, 256, 256, generator=generator)).contiguous(memory_format=format)
    count, _, squares = local_moments(x, (0, 2, 3))
    torch.testing.assert_close(squares / count, expected(x, (0, 2, 3))[1], rtol=1e-6, atol=0)


def test_parts_merge_to_the_whole_and_empty_parts_are_neutral() -> None:
    x = torch.randn(7, 3, 4, dtype=torch.float64) + 1e6
    rows = torch.stack([local_moments(part, (0, 2)) for part in (x[:1], x[1:1], x[1:6], x[6:])])
    torch.testing.assert_close(merge_moments(rows), local_moments(x, (0, 2)), rtol=1e-9, atol=0)
    assert merge_moments(rows[1:2]).count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_in_float(dtype: torch.dtype) -> None:
    x = torch.ones(1, 1, 100, 100, dtype=dtype)
    count, mean, squares = local_moments(x, (0, 2, 3)).flatten()
    assert (count, mean, squares) == (10_000, 1, 0)
