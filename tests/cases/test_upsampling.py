"""K05: transposed convolutions, interpolation and shuffles know where they are in the whole."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.compare import assert_equal_to_one_process, one_process


class Applied(nn.Module):
    """A function of the input, after a pointwise convolution so that there is a parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor], channels: int = 3) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(channels, channels, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x))


@dataclass(frozen=True)
class Interpolated:
    """`F.interpolate` with these arguments."""

    arguments: dict[str, object]

    def __call__(self, x: Tensor) -> Tensor:
        return F.interpolate(x, **self.arguments)


class ToSize(nn.ConvTranspose2d):
    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        return super().forward(x, [18, 13])


def test_c15_transposed_convolutions() -> None:
    x = torch.randn(1, 4, 9, 7)
    plans = ("h=2,w=2", "h=3", "w=4")
    odd = partial(nn.ConvTranspose2d, 4, 3, 3, 2, 1, output_padding=1)
    assert_equal_to_one_process(odd, [x], *plans, shape=(1, 3, 18, 14))
    assert_equal_to_one_process(partial(nn.ConvTranspose2d, 4, 3, 4, 2, 1), [x], *plans, shape=(1, 3, 18, 14))
    assert_equal_to_one_process(partial(ToSize, 4, 3, 3, 2, 1), [x], *plans, shape=(1, 3, 18, 13))
    grouped = partial(nn.ConvTranspose2d, 4, 6, 5, 3, 2, groups=2, dilation=2)
    assert_equal_to_one_process(grouped, [x], *plans)


@pytest.mark.parametrize("how", [{"scale_factor": 2}, {"size": (14, 18)}], ids=["scale", "size"])
def test_c16_interpolation(how: dict[str, object]) -> None:
    x = torch.randn(1, 3, 7, 9)
    for mode, corners in (("bilinear", True), ("bilinear", False), ("bicubic", False), ("bicubic", True)):
        build = partial(Applied, Interpolated({**how, "mode": mode, "align_corners": corners}))
        assert_equal_to_one_process(build, [x], "h=2", "h=2,w=2", "w=3", shape=(1, 3, 14, 18))


def test_c17_shuffles_flips_and_rolls() -> None:
    def shuffled() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2))

    x = torch.randn(1, 3, 7, 6)
    assert_equal_to_one_process(shuffled, [x], "h=2", "h=2,w=1", "w=1", shape=(1, 3, 14, 12))
    unshuffled = partial(Applied, nn.PixelUnshuffle(2))
    assert_equal_to_one_process(unshuffled, [torch.randn(1, 3, 14, 6)], "h=4", "w=2", "h=1", shape=(1, 12, 7, 3))
    flipped = partial(Applied, lambda x: x.flip(-1))
    assert_equal_to_one_process(flipped, [x], "w=2", "h=2", "w=1,h=2")
    rolled = partial(Applied, lambda x: x.roll(1, -2))
    assert_equal_to_one_process(rolled, [x], "h=2", "w=3", "h=1")


def test_c18_fractional_scales() -> None:
    x = torch.randn(1, 2, 11, 13)
    found = []
    for recompute in (None, True):
        arguments = {"scale_factor": 1.5, "mode": "bilinear", "align_corners": False,
                     "recompute_scale_factor": recompute}  # fmt: skip
        build = partial(Applied, Interpolated(arguments), 2)
        assert_equal_to_one_process(build, [x], "h=3", "w=2", shape=(1, 2, 16, 19))
        torch.manual_seed(0)
        found.append(one_process(build().double(), [x.double()]).outputs[0])
    assert not torch.allclose(found[0], found[1])
    for mode in ("nearest", "nearest-exact"):
        build = partial(Applied, Interpolated({"size": (10, 15), "mode": mode}), 2)
        assert_equal_to_one_process(build, [torch.randn(1, 2, 7, 9)], "h=2", "h=4", "w=2", shape=(1, 2, 10, 15))
