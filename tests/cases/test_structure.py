"""K11: skips of other sizes, functional calls, reparametrised weights, hooks, patched and in-place code."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.errors import CaptureError
from halocline.step import parallelize
from tests.cases.compare import assert_equal_to_one_process
from tests.nets import OddUNet


class Cropping(nn.Module):
    """A U-Net level without padding: the skip is cropped to the size of what comes up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.inner = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3)
        self.up, self.last = nn.ConvTranspose2d(6, 4, 2, 2), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.first(x))
        x = self.up(F.relu(self.inner(self.down(skip))))
        top, left = ((a - b) // 2 for a, b in zip(skip.shape[2:], x.shape[2:]))
        return self.last(torch.cat([skip[:, :, top : top + x.shape[2], left : left + x.shape[3]], x], 1))


def test_c38_skips_of_other_sizes() -> None:
    x = torch.randn(1, 3, 37, 45)
    assert_equal_to_one_process(OddUNet, [x], "h=2,w=2", "h=3", shape=(1, 4, 37, 45))
    assert_equal_to_one_process(Cropping, [x], "h=2,w=2", "w=3")


class VolumeUNet(nn.Module):
    """Three levels, whose odd sizes come back one voxel short unless padded."""

    def __init__(self, pads: bool) -> None:
        super().__init__()
        widths, self.pads = (1, 3, 4, 5), pads
        self.convs = nn.ModuleList(nn.Conv3d(a, b, 3, padding=1) for a, b in zip(widths, widths[1:]))
        self.ups = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for a, b in zip(widths[1:], widths[2:]))
        self.merges = nn.ModuleList(nn.Conv3d(2 * a, a, 3, padding=1) for a in widths[1:-1])
        self.head = nn.Conv3d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for conv in self.convs:
            x = F.relu(conv(x))
            skips.append(x)
            x = F.max_pool3d(x, 2)
        x = skips.pop()
        for up, merge in zip(reversed(self.ups), reversed(self.merges)):
            x, skip = up(x), skips.pop()
            if self.pads:
                x = F.pad(x, [n for a, b in zip(reversed(skip.shape[2:]), reversed(x.shape[2:])) for n in (0, a - b)])
            x = F.relu(merge(torch.cat([skip, x], 1)))
        return self.head(x)


def test_c39_volumes_that_do_not_divide() -> None:
    x = torch.randn(1, 1, 20, 18, 13)
    assert_equal_to_one_process(partial(VolumeUNet, True), [x], "h=2", "d=3", "d=2,w=2", shape=(1, 1, 20, 18, 13))

    model = VolumeUNet(False)

    def rank(comm: Comm) -> None:
        with pytest.raises(CaptureError, match=r"test_structure.py:\d+.*Sizes of tensors must match"):
            parallelize(copy.deepcopy(model), None, [x], "h=2", comm=comm)

    run_threads(2, rank)


class Reparametrised(nn.Module):
    def __init__(self, wrap: object) -> None:
        super().__init__()
        self.first, self.second = wrap(nn.Conv2d(4, 4, 3, padding=1)), nn.Conv2d(4, 2, 3, padding=1)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.relu(self.first(x)), self.second.weight, padding=1)


@pytest.mark.parametrize(
    "wrap", [nn.Identity, parametrizations.weight_norm, parametrizations.spectral_norm, old_spectral_norm],
    ids=["functional", "weight_norm", "spectral_norm", "old_spectral_norm"],
)  # fmt: skip
def test_c40_functional_calls_and_reparametrised_weights(wrap: object) -> None:
    build = partial(Reparametrised, nn.Sequential if wrap is nn.Identity else wrap)
    assert_equal_to_one_process(build, [torch.randn(1, 4, 10, 10)], "h=2", "w=3", steps=2)
    assert_equal_to_one_process(lambda: build().eval(), [torch.randn(1, 4, 10, 10)], "h=2")


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x), inplace=True)
        y = self.second(y).add_(x)
        y[:, :, 0:1].mul_(2)
        return y.clamp_(min=0)


def test_c41_in_place_ops_on_views() -> None:
    assert_equal_to_one_process(InPlace, [torch.randn(1, 4, 9, 8)], "h=2", "w=3")
