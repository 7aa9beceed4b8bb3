"""Small and synthetic pictures with class labels."""

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from halocline.errors import HaloclineError


def digits(size: int, seed: int = 0) -> TensorDataset:
    """scikit-learn's 1797 handwritten digits, enlarged: items `(x[1, size, size], label)`, in an order drawn by `seed`.

    Values lie within 0 and 1 (bilinear, from 8 x 8). Raises `HaloclineError` if scikit-learn is not installed, and
    `ValueError` for a size under 8.
    """
    if size < 8:
        raise ValueError(f"digits: size {size}. The pictures are 8 x 8; give at least 8.")
    try:
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise HaloclineError(
            "digits: the pictures come with scikit-learn, which is not installed. Run `pip install 'halocline[data]'`."
        ) from e
    pictures, labels = load_digits(return_X_y=True)
    small_nchw = torch.from_numpy(pictures).to(torch.float32).reshape(-1, 1, 8, 8) / 16.0
    x = torch.nn.functional.interpolate(small_nchw, size=(size, size), mode="bilinear", align_corners=False)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x[order], torch.from_numpy(labels).to(torch.int64)[order])


class SyntheticImagenet(Dataset[tuple[Tensor, Tensor]]):
    """Coloured gratings in noise, one direction, pitch and colour per class: item i depends on `seed` and i alone."""

    def __init__(self, size: int, classes: int, seed: int, length: int) -> None:
        self.size, self.classes, self.seed, self.length = size, classes, seed, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if not 0 <= i < self.length:
            raise IndexError(f"SyntheticImagenet: item {i} of a data set of {self.length}")
        draw = torch.Generator().manual_seed(mixed_seed(self.seed, i))
        label = int(torch.randint(self.classes, (), generator=draw))
        # Golden-ratio steps spread the classes evenly over directions, pitches and colours.
        angle, pitch, hue = (2.0 * math.pi * label * step for step in (0.6180339887, 0.7548776662, 0.5698402910))
        waves = 4.0 + 2.0 * math.sin(pitch)
        at = torch.linspace(0.0, 2.0 * math.pi * waves, self.size)
        phase = 2.0 * math.pi * torch.rand((), generator=draw)
        grating = torch.sin(math.cos(angle) * at[None, :] + math.sin(angle) * at[:, None] + phase)
        colour = torch.tensor([math.cos(hue + shift) for shift in (0.0, 2.0 * math.pi / 3, 4.0 * math.pi / 3)])
        x = colour[:, None, None] * grating + 0.5 * torch.randn(3, self.size, self.size, generator=draw)
        return x, torch.tensor(label)


def synthetic_imagenet(size: int, classes: int = 1000, seed: int = 0, length: int = 1_281_167) -> SyntheticImagenet:
    """Made-up pictures of ImageNet's form: items `(x[3, size, size], label)`, label 0 to `classes` - 1.

    Raises `ValueError` unless `size` and `classes` are positive.
    """
    if size < 1 or classes < 1:
        raise ValueError(f"synthetic_imagenet: size {size}, classes {classes}. Both must be positive.")
    return SyntheticImagenet(size, classes, seed, length)


def mixed_seed(seed: int, i: int) -> int:
    """One 63-bit seed from two numbers (splitmix64), so that neighbouring items do not share their noise."""
    z = (seed * 0x9E3779B97F4A7C15 + i + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1
