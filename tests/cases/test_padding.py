"""K04: padding belongs to the edges of the whole, never to those of a part."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.compare import assert_equal_to_one_process


class Padded(nn.Module):
    """Pads in turn, then convolves."""

    def __init__(self, conv: nn.Module, *pads: tuple[list[int], str, float | None]) -> None:
        super().__init__()
        self.conv, self.pads = conv, pads

    def forward(self, x: Tensor) -> Tensor:
        for widths, mode, value in self.pads:
            x = F.pad(x, widths, mode, value)
        return self.conv(x)


def test_c10_circular_padding_joins_the_first_and_the_last_rank() -> None:
    x = torch.randn(1, 6, 20, 10)
    wide = partial(nn.Conv2d, 6, 1, 3, padding=(0, 1), padding_mode="circular")
    assert_equal_to_one_process(wide, [x], "w=2", "h=2", "w=3", shape=(1, 1, 18, 10))
    tall = partial(nn.Conv2d, 6, 1, (5, 3), padding=(2, 1), padding_mode="circular")
    assert_equal_to_one_process(tall, [x], "w=3", "h=4", "h=2,w=2", shape=(1, 1, 20, 10))
    one_sided = partial(Padded, nn.Identity(), ([4, 0, 3, 0], "circular", None))
    assert_equal_to_one_process(one_sided, [x], "h=2", "w=4", shape=(1, 6, 23, 14), exactly=True)


def test_c11_one_sided_padding_once_not_once_per_part() -> None:
    above, below = ([0, 0, 2, 0], "replicate", None), ([0, 0, 0, 2], "constant", 1.0)
    pads = partial(Padded, nn.Identity(), above, below)
    x = torch.randn(1, 1, 80, 10)
    assert_equal_to_one_process(pads, [x], "h=4", shape=(1, 1, 84, 10), exactly=True)
    assert_equal_to_one_process(lambda: Padded(nn.Conv2d(1, 1, 3), above, below), [x], "h=4", "w=2")
    replicate = partial(nn.Conv2d, 2, 2, 5, padding=2, padding_mode="replicate")
    assert_equal_to_one_process(replicate, [torch.randn(1, 2, 11, 9)], "h=3", "h=2,w=2")
    reflect = partial(nn.Conv2d, 2, 2, 5, padding=2, padding_mode="reflect")
    assert_equal_to_one_process(reflect, [torch.randn(1, 2, 11, 9)], "h=4", "w=3")


class SamePadded(nn.Conv2d):
    """As TensorFlow pads: depends on the size of the input, which its code reads."""

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for size, kernel, stride in zip(reversed(x.shape[2:]), reversed(self.kernel_size), reversed(self.stride)):
            total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            pads += [total // 2, total - total // 2]
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, self.stride)


def test_c12_asymmetric_padding_and_code_that_reads_sizes() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(4, 4, 3, 2))

    assert_equal_to_one_process(build, [torch.randn(1, 4, 16, 18)], "h=2", "w=2", "h=3", shape=(1, 4, 8, 9))
    assert_equal_to_one_process(build, [torch.randn(1, 4, 15, 17)], "h=2", "w=2", "w=5", shape=(1, 4, 7, 8))
    same = partial(SamePadded, 4, 4, 3, 2)
    assert_equal_to_one_process(same, [torch.randn(1, 4, 18, 17)], "h=2", "h=2,w=2", shape=(1, 4, 9, 9))
    assert_equal_to_one_process(partial(nn.Conv2d, 4, 4, 4, padding="same"), [torch.randn(1, 4, 9, 7)], "h=2", "w=3")
