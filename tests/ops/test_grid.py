"""Grids and samples, alone and in a spatial transformer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.verify import Report, verify

from .fixed_split import check_split

aten = torch.ops.aten


def image(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("align", [False, True])
def test_places_of_a_part_lie_in_the_whole_grid(align: bool) -> None:
    for split in ({"h": 3}, {"n": 2, "w": 4}):
        check_split(aten.affine_grid_generator.default, image(2, 2, 3), [2, 1, 5, 7], align, split=split)
    check_split(aten.affine_grid_generator.default, image(2, 3, 4), [2, 1, 3, 1, 4], align, split={"d": 2, "w": 2})


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_samples_in_parts(mode: int) -> None:
    for split in ({"h": 3}, {"c": 2, "w": 2}, {"n": 2, "h": 2}):
        check_split(aten.grid_sampler.default, image(2, 3, 5, 6), image(2, 4, 7, 2), mode, 0, False, split=split)


class SpatialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Conv2d(3, 2, 3, padding=1)
        self.theta = nn.Linear(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.theta(self.look(x).mean((2, 3))).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False, padding_mode="border")


@pytest.mark.parametrize("plan", ["sample", "spatial", "h=2,w=2"])
def test_network_equals_one_process(plan: str) -> None:
    torch.manual_seed(0)
    whole = SpatialTransformer().double()

    def rank(comm: Comm) -> Report:
        return verify(copy.deepcopy(whole), None, (image(4, 3, 7, 6),), plan, comm=comm)

    for report in run_threads(4, rank):
        assert report.passed, str(report)
