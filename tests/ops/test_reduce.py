"""Reductions under chosen splits: ties, infinities, half precision, parts without elements."""

from typing import Any

import pytest
import torch

from halocline.ops import rule_for

from .fixed_split import check_split, node_for

aten = torch.ops.aten


def image(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("op", [aten.amax.default, aten.amin.default])
def test_ties_share_the_gradient_across_ranks(op: Any) -> None:
    check_split(op, torch.zeros(2, 3, 4, 5, dtype=torch.float64), [1, 2], split={"c": 2, "h": 3})


@pytest.mark.parametrize("op", [aten.max.default, aten.min.default])
def test_ties_of_the_whole_tensor_share_the_gradient(op: Any) -> None:
    check_split(op, image(2, 3, 4, 5).round(), split={"n": 2, "w": 3})


@pytest.mark.parametrize("output", [0, 1])
def test_the_first_of_equal_elements_is_where_the_maximum_lies(output: int) -> None:
    x = image(2, 6, 4).round()
    check_split(aten.max.dim, x, 1, split={"c": 4}, output=output)
    check_split(aten.min.dim, x, -1, split={"w": 3}, output=output)


@pytest.mark.parametrize("dim", [None, 0, 2])
def test_argmax(dim: int | None) -> None:
    check_split(aten.argmax.default, image(3, 4, 5).round(), dim, split={"n": 2, "w": 3})


def test_more_ranks_than_elements() -> None:
    for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.logsumexp.default, aten.var.dim):
        check_split(op, image(2, 3, 2, 5), [2], split={"h": 5, "n": 2})
    check_split(aten.all.dim, image(2, 3) > -9, 1, split={"c": 5})
    check_split(aten.argmin.default, image(2, 3), None, split={"c": 5})


@pytest.mark.parametrize("order", [2, 1, 0, 3, float("inf"), float("-inf")])
def test_norms_of_nothing_but_zeros(order: float) -> None:
    check_split(aten.linalg_vector_norm.default, torch.zeros(2, 6, dtype=torch.float64), order, [1], split={"c": 3})


def test_means_of_whole_numbers_and_counts() -> None:
    check_split(aten.sum.default, torch.arange(24).reshape(4, 6), split={"n": 3, "c": 2})
    check_split(aten.count_nonzero.default, torch.arange(24).reshape(4, 6) % 3, split={"n": 3, "c": 2})
    check_split(aten.any.default, torch.arange(24).reshape(4, 6) == 23, split={"n": 3, "c": 2})


def test_sums_that_pass_over_nan() -> None:
    x = image(4, 5)
    x[1, 2:4] = torch.nan
    check_split(aten.nansum.default, x, [1], split={"c": 3})
    check_split(aten.logsumexp.default, torch.full((2, 5), -torch.inf), [1], split={"n": 2})


def test_bfloat16_is_summed_in_float() -> None:
    x = torch.ones(64, 64, dtype=torch.bfloat16)  # bfloat16 cannot count to 4096
    x[0, 0] = 513
    check_split(aten.sum.default, x, split={"n": 4})
    check_split(aten.mean.dim, x, [0], split={"n": 4})


def test_standard_deviation_of_a_constant_has_no_gradient() -> None:
    check_split(aten.std.correction, torch.full((4, 6), 3.0, dtype=torch.float64), [1], correction=0, split={"c": 3})


def test_products_split_the_other_dims_only() -> None:
    node, _ = node_for(aten.prod.dim_int, image(2, 3, 4), 1)
    assert set(rule_for(node).signature(node).indices) == {"n", "w"}
