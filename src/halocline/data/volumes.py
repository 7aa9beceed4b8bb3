"""Made-up pictures and volumes: bright bodies in noise to segment, and density fields to read parameters off."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from halocline.data.images import mixed_seed

_BODIES = 6
_EPOCHS = 4


class Bodies(Dataset[tuple[Tensor, Tensor]]):
    """Ellipsoids in noise: items `(x[1, size, ...], mask[1, size, ...])` in `dims` dimensions, mask 0 or 1, fp32.

    Item i depends on `seed` and i alone. Raises `ValueError` unless `size` is positive and `dims` is 2 or 3.
    """

    def __init__(self, size: int, dims: int, length: int, seed: int = 0) -> None:
        if size < 1 or dims not in (2, 3):
            raise ValueError(f"Bodies: size {size}, dims {dims}. Give a positive size, and 2 or 3 dims.")
        self.size, self.dims, self.length, self.seed = size, dims, length, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if not 0 <= i < self.length:
            raise IndexError(f"Bodies: item {i} of a data set of {self.length}")
        draw = torch.Generator().manual_seed(mixed_seed(self.seed, i))
        axis = (torch.arange(self.size) + 0.5) / self.size
        grid = torch.stack(torch.meshgrid([axis] * self.dims, indexing="ij"))
        mask = torch.zeros([self.size] * self.dims)
        for _ in range(_BODIES):
            centre = torch.rand(self.dims, generator=draw)
            radii = 0.06 + 0.14 * torch.rand(self.dims, generator=draw)
            shape = [self.dims] + [1] * self.dims
            distance2 = (((grid - centre.reshape(shape)) / radii.reshape(shape)) ** 2).sum(0)
            mask = torch.maximum(mask, (distance2 < 1.0).to(mask.dtype))
        x = mask + 0.7 * torch.randn(mask.shape, generator=draw)
        return x[None], mask[None]


class DensityFields(Dataset[tuple[Tensor, Tensor]]):
    """Gaussian random fields at four epochs: items `(x[4, size, size, size], y[4])`, fp32.

    `y` is spectral slope, amplitude, growth from epoch to epoch, and smoothing length, each scaled to -1..1. Item i
    depends on `seed` and i alone. Raises `ValueError` unless `size` is at least 2.
    """

    def __init__(self, size: int, length: int, seed: int = 0) -> None:
        if size < 2:
            raise ValueError(f"DensityFields: size {size}. Give at least 2.")
        self.size, self.length, self.seed = size, length, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if not 0 <= i < self.length:
            raise IndexError(f"DensityFields: item {i} of a data set of {self.length}")
        draw = torch.Generator().manual_seed(mixed_seed(self.seed, i))
        y = 2.0 * torch.rand(4, generator=draw) - 1.0
        slope, amplitude, growth, smoothing = y.unbind()
        noise = torch.randn([self.size] * 3, generator=draw)
        k, k_last = torch.fft.fftfreq(self.size), torch.fft.rfftfreq(self.size)
        wavenumber = (k[:, None, None] ** 2 + k[None, :, None] ** 2 + k_last**2).sqrt().clamp(min=1.0 / self.size)
        # Power spectrum k^n exp(-(k R)^2), n from -2.5 to -0.5 and R from 0 to 4 voxels.
        transfer = wavenumber ** (0.5 * (slope - 1.5)) * torch.exp(-0.5 * (wavenumber * (2.0 + 2.0 * smoothing)) ** 2)
        field = torch.fft.irfftn(torch.fft.rfftn(noise) * transfer, s=noise.shape)
        epochs = (1.2 + 0.2 * growth) ** torch.arange(_EPOCHS)
        x = epochs[:, None, None, None] * (0.5 + 0.2 * amplitude) * field
        return x, y
