"""Losses under chosen splits: what a mean divides by, and precision."""

from typing import Any

import pytest
import torch
from torch import Tensor

from .constant_inputs import check_first_gradient
from .fixed_split import check_split

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def image(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def classes(*shape: int, of: int) -> Tensor:
    return torch.randint(0, of, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("split", [{"n": 2, "h": 3}, {"w": 6}, {"n": 5}])
def test_class_weights_and_ignored_classes(reduction: int, smoothing: float, split: dict[str, int]) -> None:
    target = classes(2, 4, 5, of=3)
    weight = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    args = (image(2, 3, 4, 5), target, weight, reduction, 1, smoothing)
    check_first_gradient(aten.cross_entropy_loss.default, args, split)
    check_first_gradient(aten.nll_loss_nd.default, args[:5], split)


def test_a_rank_whose_targets_are_all_ignored() -> None:
    target = classes(4, 6, of=3)
    target[:2] = -100
    check_split(aten.cross_entropy_loss.default, image(4, 3, 6), target, split={"n": 2})


def test_the_mean_over_no_target_is_not_a_number() -> None:
    target = torch.full((4, 6), -100)
    check_split(aten.cross_entropy_loss.default, image(4, 3, 6), target, split={"n": 2})
    check_split(aten.nll_loss_nd.default, image(4, 3, 6), target, None, SUM, split={"n": 2})


def test_one_sample_without_a_batch_dim() -> None:
    check_split(aten.cross_entropy_loss.default, image(5), torch.tensor(3), split={})


@pytest.mark.parametrize("reduction", [MEAN, SUM])
@pytest.mark.parametrize("op", [aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss])
def test_more_ranks_than_elements(op: Any, reduction: int) -> None:
    check_split(op.default, image(1, 1, 3), image(1, 1, 3) - 1, reduction, split={"w": 4, "n": 2})


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_weights_that_broadcast(reduction: int) -> None:
    x, target = image(2, 3, 4, 5), image(2, 3, 4, 5).sigmoid()
    weight, positive = torch.rand(4, 1, dtype=torch.float64), torch.rand(3, 1, 1, dtype=torch.float64)
    args = (x, target, weight, positive, reduction)
    for split in ({"h": 3, "c": 2}, {"n": 2, "w": 3}):
        check_first_gradient(aten.binary_cross_entropy_with_logits.default, args, split)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float(dtype: torch.dtype) -> None:
    x = torch.full((64, 64), 3.0, dtype=dtype)
    x[0, 0] = 30
    check_split(aten.mse_loss.default, x, torch.full_like(x, 2.0), split={"n": 4})
