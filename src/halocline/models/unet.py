"""U-Nets in two and three dimensions: Ronneberger et al. (2015), Çiçek et al. (2016).

Per level two 3x3 convolutions, each with batch norm and ReLU, then 2x2 max pooling; on the way up a 2x2 transposed
convolution with stride 2, and the skip concatenated before it. Convolutions keep the size ("same" padding).
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from halocline.models.mesh_tangling import check_size, scaled

_LAYERS: dict[int, tuple[type[nn.Module], type[nn.Module], type[nn.Module], type[nn.Module]]] = {
    2: (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.ConvTranspose2d),
    3: (nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d, nn.ConvTranspose3d),
}


def unet2d(
    size: int = 256,
    channels: int = 1,
    classes: int = 1,
    features: Sequence[int] = (32, 64, 128, 256, 512),
    width: float = 1.0,
) -> "UNet":
    """A 2-D U-Net: `[N, channels, size, size]` to logits `[N, classes, size, size]`, one level per entry of `features`.

    Any height and width that are multiples of `2 ** (len(features) - 1)` do. Raises `ValueError` if `size` is not one.
    """
    check_size("unet2d", size, 2 ** (len(features) - 1))
    return UNet(2, channels, classes, [scaled(f, width) for f in features])


def unet3d(
    size: int = 64,
    channels: int = 1,
    classes: int = 1,
    features: Sequence[int] = (16, 32, 64, 128),
    width: float = 1.0,
) -> "UNet":
    """A 3-D U-Net: `[N, channels, size, size, size]` to logits `[N, classes, size, size, size]`.

    Any depth, height and width that are multiples of `2 ** (len(features) - 1)` do. Raises `ValueError` if `size` is
    not one.
    """
    check_size("unet3d", size, 2 ** (len(features) - 1))
    return UNet(3, channels, classes, [scaled(f, width) for f in features])


class UNet(nn.Module):
    """`down[l]` and `up[l]` work at level `l`, whose extents are the input's over `2**l`; `bottom` at the last one."""

    def __init__(self, dims: Literal[2, 3], channels: int, classes: int, features: Sequence[int]) -> None:
        super().__init__()
        conv, _, pool, transposed = _LAYERS[dims]
        *skips, c_bottom = features
        c_in = [channels, *features]
        self.down = nn.ModuleList(_double_conv(dims, c_in[level], c) for level, c in enumerate(skips))
        self.pool = pool(2)
        self.bottom = _double_conv(dims, c_in[-2], c_bottom)
        self.enlarge = nn.ModuleList(transposed(features[level + 1], c, 2, stride=2) for level, c in enumerate(skips))
        self.up = nn.ModuleList(_double_conv(dims, 2 * c, c) for c in skips)
        self.head = conv(features[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for enlarge, up, skip in zip(reversed(self.enlarge), reversed(self.up), reversed(skips), strict=True):
            x = up(torch.cat([skip, enlarge(x)], dim=1))
        logits: Tensor = self.head(x)
        return logits


def _double_conv(dims: Literal[2, 3], c_in: int, c_out: int) -> nn.Sequential:
    conv, norm, _, _ = _LAYERS[dims]
    layers: list[nn.Module] = []
    for c in (c_in, c_out):
        layers += [conv(c, c_out, 3, padding=1, bias=False), norm(c_out), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)
