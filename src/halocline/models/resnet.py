"""Residual networks of He et al. (2016), with the module names of torchvision.

`resnet50(stride="first")` is the original, and the one Dryden et al. time: a block that halves the map does so in its
first 1x1 convolution. `stride="middle"` does it in the 3x3 convolution, as torchvision does. Both have the same
parameters under the same names. Weights start as in He et al. (2015).
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from halocline.models.mesh_tangling import scaled

StrideAt = Literal["first", "middle"]


def resnet50(stride: StrideAt = "first", classes: int = 1000, width: float = 1.0) -> "ResNet":
    """ResNet-50: `[N, 3, H, W]` to logits `[N, classes]`; the standard H = W is 224, the least is 32.

    `width` multiplies the number of channels. Raises `ValueError` for a `stride` other than "first" and "middle".
    """
    return _bottlenecks((3, 4, 6, 3), stride, classes, width)


def resnet152(stride: StrideAt = "first", classes: int = 1000, width: float = 1.0) -> "ResNet":
    """ResNet-152, the deepest of He et al. (2016); arguments and errors as for `resnet50`."""
    return _bottlenecks((3, 8, 36, 3), stride, classes, width)


def _bottlenecks(depths: Sequence[int], stride: StrideAt, classes: int, width: float) -> "ResNet":
    if stride not in ("first", "middle"):
        raise ValueError(f'ResNet: stride={stride!r} is not a placement. Use "first" (the 1x1) or "middle" (the 3x3).')
    c_stem = c_in = scaled(64, width)
    stages: list[nn.Sequential] = []
    for s, depth in enumerate(depths):
        c_middle = scaled(64 * 2**s, width)
        blocks = [Bottleneck(c_in, c_middle, 1 if s == 0 else 2, stride)]
        c_in = c_middle * Bottleneck.expansion
        blocks += [Bottleneck(c_in, c_middle, 1, stride) for _ in range(depth - 1)]
        stages.append(nn.Sequential(*blocks))
    stem = nn.Conv2d(3, c_stem, 7, stride=2, padding=3, bias=False)
    return ResNet(stem, nn.MaxPool2d(3, stride=2, padding=1), stages, c_in, classes)


def resnet_small(channels: int = 1, classes: int = 10, width: float = 1.0) -> "ResNet":
    """A residual net of six basic blocks for small pictures: `[N, channels, H, W]`, H and W of 32 to 64, to logits.

    Like the CIFAR nets of He et al. (2016), section 4.2: a 3x3 stem without pooling, then 16, 32 and 64 channels.
    """
    c_stem = c_in = scaled(16, width)
    stages: list[nn.Sequential] = []
    for s in range(3):
        c_out = scaled(16 * 2**s, width)
        stages.append(nn.Sequential(BasicBlock(c_in, c_out, 1 if s == 0 else 2), BasicBlock(c_out, c_out, 1)))
        c_in = c_out
    return ResNet(nn.Conv2d(channels, c_stem, 3, padding=1, bias=False), nn.Identity(), stages, c_in, classes)


class ResNet(nn.Module):
    """Stem, pooling, stages `layer1`, `layer2`, ..., mean over the map, and one linear layer."""

    def __init__(
        self, stem: nn.Conv2d, pool: nn.Module, stages: Sequence[nn.Sequential], c_out: int, classes: int
    ) -> None:
        super().__init__()
        self.conv1 = stem
        self.bn1 = nn.BatchNorm2d(stem.out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = pool
        self.stages = [f"layer{s}" for s in range(1, len(stages) + 1)]
        for name, stage in zip(self.stages, stages, strict=True):
            self.add_module(name, stage)
        # At 224 x 224 this is the 7x7 average pooling of the original; it also takes other sizes.
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(c_out, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for name in self.stages:
            x = self.get_submodule(name)(x)
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; the first has the stride."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.downsample = _projection(c_in, c_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += shortcut
        out: Tensor = self.relu(y)
        return out


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; `stride_at` says which of the first two has the stride."""

    expansion = 4

    def __init__(self, c_in: int, c_middle: int, stride: int, stride_at: StrideAt) -> None:
        super().__init__()
        c_out = c_middle * self.expansion
        first, middle = (stride, 1) if stride_at == "first" else (1, stride)
        self.conv1 = nn.Conv2d(c_in, c_middle, 1, first, bias=False)
        self.bn1 = nn.BatchNorm2d(c_middle)
        self.conv2 = nn.Conv2d(c_middle, c_middle, 3, middle, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_middle)
        self.conv3 = nn.Conv2d(c_middle, c_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(c_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _projection(c_in, c_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += shortcut
        out: Tensor = self.relu(y)
        return out


def _projection(c_in: int, c_out: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and c_in == c_out:
        return None
    return nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))
