"""Adaptive pooling under chosen splits."""

import pytest
import torch

from halocline.ops import rule_for
from halocline.ops.taps import Taps

from .fixed_split import check_split, node_for, reads

aten = torch.ops.aten


def image(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("split", [{"h": 2}, {"h": 3, "w": 2}, {"h": 7}, {"n": 2, "c": 2}])
def test_global_average(split: dict[str, int]) -> None:
    check_split(aten.adaptive_avg_pool2d.default, image(2, 3, 5, 6), [1, 1], split=split)


def test_global_average_gathers_nothing() -> None:
    node, _ = node_for(aten.adaptive_avg_pool2d.default, image(2, 3, 7, 7), [1, 1])
    assert reads(node, h=(3, 5))[0].intervals == ((0, 2), (0, 3), (3, 5), (0, 7))
    assert rule_for(node).signature(node).output == ("n", "c", None, None)


def test_average_that_ends_in_one_row() -> None:
    check_split(aten.adaptive_avg_pool3d.default, image(1, 2, 7, 5, 6), [1, 3, 6], split={"d": 2, "h": 2, "w": 2})


@pytest.mark.parametrize("size", [(3, 5), (6, 2), (25, 11), (12, 10)])
def test_windows_that_overlap_or_repeat(size: tuple[int, int]) -> None:
    check_split(aten.adaptive_avg_pool2d.default, image(1, 2, 12, 10), size, split={"h": 2, "w": 3})
    check_split(aten.adaptive_max_pool2d.default, image(1, 2, 12, 10), size, split={"h": 2, "w": 3}, output=1)


def test_more_ranks_than_windows() -> None:
    check_split(aten.adaptive_avg_pool2d.default, image(1, 2, 12, 10), [2, 2], split={"h": 5})


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("size", [(1, 1), (1, 3), (4, 1)])
def test_the_first_of_equal_maxima_wins_wherever_the_others_are(size: tuple[int, int], output: int) -> None:
    x = torch.zeros(2, 2, 6, 7, dtype=torch.float64)
    check_split(aten.adaptive_max_pool2d.default, x, size, split={"h": 3, "w": 2}, output=output)


@pytest.mark.parametrize("output", [0, 1])
def test_global_maximum_of_minus_infinities(output: int) -> None:
    x = torch.full((1, 1, 6, 7), -torch.inf, dtype=torch.float64)
    check_split(aten.adaptive_max_pool2d.default, x, [1, 1], split={"h": 3, "w": 2}, output=output)


def test_half_precision_is_summed_in_float() -> None:
    x = torch.full((1, 1, 64, 64), 1.0, dtype=torch.bfloat16)  # bfloat16 cannot count to 4096
    x[0, 0, 0, 0] = 513.0
    check_split(aten.adaptive_avg_pool2d.default, x, [1, 1], split={"h": 4})


def test_taps_and_their_adjoint() -> None:
    index, weights = torch.tensor([[0, 1], [2, 3], [1, 3]]), torch.rand(3, 2, dtype=torch.float64)
    taps = Taps(index, weights, 5)
    x, y = image(2, 5, 3), image(2, 3, 3)
    torch.testing.assert_close((taps.apply(x, 1) * y).sum(), (x * taps.adjoint.apply(y, 1)).sum())
