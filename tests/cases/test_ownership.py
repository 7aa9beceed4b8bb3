"""K01 strides and uneven parts, K02 halos wider than a neighbour, K03 parts that are empty, K06 groups and corners."""

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.step import parallelize
from tests.cases.compare import Counting, assert_equal_to_one_process


def test_c01_strides_and_uneven_rows() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 3))

    x = torch.randn(1, 3, 17, 23)
    assert_equal_to_one_process(partial(nn.Conv2d, 3, 8, 3, 2, 1), [x], "h=4", shape=(1, 8, 9, 12))
    assert_equal_to_one_process(partial(nn.Conv2d, 3, 8, 3, 3), [x], "h=4", shape=(1, 8, 5, 7))
    assert_equal_to_one_process(build, [x], "h=4", "w=3", "h=2,w=2", "w=7")


def test_c02_even_kernels() -> None:
    x = torch.randn(2, 3, 14, 15)
    first = partial(nn.Conv2d, 3, 5, (2, 4), 1, (1, 2))
    assert_equal_to_one_process(first, [x], "h=2,w=2", "h=3", shape=(2, 5, 15, 16))
    assert_equal_to_one_process(partial(nn.Conv2d, 3, 5, 4, 2, 1), [x], "h=2,w=2", "w=5", shape=(2, 5, 7, 7))


def test_c03_patch_embedding_and_extent_of_the_input_gradient() -> None:
    build = partial(nn.Conv2d, 3, 256, 4, 4)
    x = torch.randn(2, 3, 16, 20)
    assert_equal_to_one_process(build, [x], "w=2", "w=3", shape=(2, 256, 4, 5), dtype=torch.float32)
    build = partial(nn.Conv2d, 3, 4, 3, padding=1)
    assert_equal_to_one_process(build, [torch.randn(2, 3, 8, 11)], "w=2", dtype=torch.float32)


class MovedDim(nn.Module):
    def __init__(self, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 8, 3, stride, 1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).transpose(2, 3))


def test_c04_split_follows_a_moved_dim() -> None:
    for stride in (1, 2):
        x = torch.randn(8, 16, 9, 11)
        assert_equal_to_one_process(partial(MovedDim, stride), [x], "n=2,h=2", "w=3", dtype=torch.float32)


def test_c06_halo_wider_than_a_neighbour() -> None:
    assert_equal_to_one_process(partial(nn.Conv2d, 2, 2, 9, padding=4), [torch.randn(1, 2, 10, 10)], "h=4", "h=8")
    assert_equal_to_one_process(partial(nn.Conv2d, 2, 2, 5, padding=1), [torch.randn(1, 2, 10, 12)], "h=2", "h=3")
    assert_equal_to_one_process(partial(nn.Conv1d, 1, 1, 7, padding=3), [torch.randn(1, 1, 13)], "w=4", "w=8")


def test_c08_more_ranks_than_rows_at_the_bottom() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip

    assert_equal_to_one_process(build, [torch.randn(1, 3, 12, 12)], "h=4", "h=8", "w=5")


class DepthwiseCut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(128, 128, 4, padding=3, groups=128)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)[..., : x.shape[-1]]


def test_c20_grouped_convolutions() -> None:
    assert_equal_to_one_process(DepthwiseCut, [torch.randn(2, 128, 37)], "w=2", "w=3", dtype=torch.float32)
    build = partial(nn.Conv2d, 16, 16, 3, padding=1, groups=4)
    x = torch.randn(8, 16, 16, 16)
    assert_equal_to_one_process(build, [x], "n=4", "h=3", dtype=torch.float32)
    model = build()

    def rank(comm: Comm) -> tuple[int, int]:
        counting = Counting(comm)
        step = parallelize(copy.deepcopy(model), None, [x], "n=4", comm=counting)
        (part,) = step.scatter(x)
        counting.exchanged = counting.reduced = 0
        step(part)
        return counting.exchanged, counting.reduced

    # Samples are split: the forward pass moves no activation. (The two numbers are how ranks agree on what they do.)
    assert run_threads(4, rank) == [(0, 2)] * 4


def test_c21_corners() -> None:
    build = partial(nn.Conv3d, 2, 3, 3, padding=1)
    assert_equal_to_one_process(build, [torch.randn(1, 2, 9, 10, 7)], "d=2,h=2", "d=2,h=2,w=2")
    # Every output of a rank reads its diagonal neighbour's block.
    assert_equal_to_one_process(partial(nn.Conv2d, 2, 2, 5, padding=2), [torch.randn(1, 2, 6, 6)], "h=2,w=2", "h=3,w=2")


def test_c40_functional_weights_stay_in_step() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, self.conv.weight, padding=1) + F.conv2d(x, self.conv.weight.flip(-1), padding=1)

    assert_equal_to_one_process(Direct, [torch.randn(1, 4, 10, 10)], "h=2", "w=3")
