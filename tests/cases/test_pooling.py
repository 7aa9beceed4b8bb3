"""K07: windows, borders, divisors and indices are those of the whole."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halocline.errors import PlanError
from halocline.step import Step
from tests.cases.compare import Passed, assert_equal_to_one_process


def test_c23_the_border_of_max_pooling_never_wins() -> None:
    def look(step: Step, passed: Passed) -> None:
        assert passed.outputs[0].max() <= -1

    x = -1 - torch.rand(1, 2, 15, 15)
    build = partial(nn.MaxPool2d, 3, 2, 1)
    assert_equal_to_one_process(build, [x], "h=2,w=2", "h=5", shape=(1, 2, 8, 8), exactly=True, look=look)


class Unpooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pooled, places = self.pool(x)
        return self.unpool(pooled, places), places


def test_c24_overlapping_windows_and_global_indices() -> None:
    build = partial(nn.MaxPool2d, 3, 2, 1)
    assert_equal_to_one_process(build, [torch.randn(1, 4, 33, 33)], "h=4", shape=(1, 4, 17, 17), exactly=True)
    assert_equal_to_one_process(Unpooled, [torch.randn(1, 1, 12, 12)], "h=2", "h=2,w=3", exactly=True)


@pytest.mark.parametrize(
    ("window", "size", "shape"),
    [((2, 2, 1), (5, 5), (3, 3)), ((1, 2, 0), (6, 7), (3, 4)), ((3, 4, 0), (9, 10), (3, 3))],
)
def test_c25_ceil_mode(window: tuple[int, int, int], size: tuple[int, int], shape: tuple[int, int]) -> None:
    def look(step: Step, passed: Passed) -> None:
        assert passed.outputs[0].isfinite().all()

    build = partial(nn.MaxPool2d, *window, ceil_mode=True)
    plans = ("h=2", "w=3", "h=2,w=2")
    assert_equal_to_one_process(
        build, [torch.randn(1, 1, *size)], *plans, shape=(1, 1, *shape), exactly=True, look=look
    )


def test_c26_divisors_of_average_pooling() -> None:
    build = partial(nn.AvgPool2d, 2, 3, ceil_mode=True)
    assert_equal_to_one_process(build, [torch.randn(1, 1, 7, 7)], "h=2", "w=3", shape=(1, 1, 3, 3))
    x = torch.randn(1, 3, 10, 13)
    for arguments in ({"count_include_pad": True}, {"count_include_pad": False}, {"divisor_override": 5}):
        build = partial(nn.AvgPool2d, 3, 2, 1, ceil_mode=True, **arguments)
        assert_equal_to_one_process(build, [x], "h=2,w=2", "h=5", shape=(1, 3, 6, 7))


class TwoReaders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return (x - y) / y.norm() + F.relu(y)


def test_c27_leaving_the_split_region() -> None:
    def pooled() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

    def flat() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(392, 10))

    x = torch.randn(2, 8, 7, 7)
    assert_equal_to_one_process(pooled, [x], "h=3", "h=7", "h=2,w=2", shape=(2, 10))
    row = torch.randn(2, 8, 1, 7)  # of a single row on two ranks one would have nothing to do
    assert_equal_to_one_process(pooled, [row], "w=2", "n=2", shape=(2, 10))
    with pytest.raises(PlanError, match="no layer can be split as asked"):
        assert_equal_to_one_process(pooled, [row], "h=2")
    assert_equal_to_one_process(flat, [x], "h=3", "n=2", "w=2", shape=(2, 10))
    assert_equal_to_one_process(TwoReaders, [x], "h=3", "n=2,h=2")
