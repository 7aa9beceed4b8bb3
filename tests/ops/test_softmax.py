"""Softmax under chosen splits of the dim itself."""

from typing import Any

import pytest
import torch

from .fixed_split import check_split

aten = torch.ops.aten
OPS = [aten.softmax.int, aten.log_softmax.int]


def image(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("split", [{"c": 3}, {"c": 2, "h": 2}, {"n": 2, "w": 3}, {"c": 7}])
def test_any_dim_may_be_split(op: Any, split: dict[str, int]) -> None:
    check_split(op, image(2, 5, 3, 4), 1, split=split)
    check_split(op, image(2, 5, 3, 4), -2, split=split)


@pytest.mark.parametrize("op", OPS)
def test_large_logits_do_not_overflow(op: Any) -> None:
    check_split(op, image(3, 6) * 1000, 1, split={"c": 3})


@pytest.mark.parametrize("op", OPS)
def test_one_class_on_many_ranks(op: Any) -> None:
    """One rank holds the whole dim and uses torch's kernel; the others hold nothing of it."""
    check_split(op, image(3, 1, 4), 1, split={"c": 3})


@pytest.mark.parametrize("op", OPS)
def test_masked_logits(op: Any) -> None:
    x = image(3, 6)
    x[:, 2:4] = -torch.inf
    check_split(op, x, 1, split={"c": 3})


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("split", [{"c": 3}, {"n": 3}])
def test_the_dtype_asked_for(op: Any, split: dict[str, int]) -> None:
    check_split(op, image(3, 6).float(), 1, torch.float64, split=split)
