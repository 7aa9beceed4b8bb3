"""Which inputs a resized dim is made of. Positions are those of ATen to the last bit, so that both take the same floor.

After ATen's `UpSample.h`: positions are computed in fp32 (fp64 for fp64 tensors) with a fused multiply-add.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch

from ..region import Interval
from .taps import Taps

ResizeMode = Literal["nearest", "nearest-exact", "linear", "cubic"]
Kernel = Literal["contiguous", "channels_last", "cuda"]
CUBIC = -0.75  # the free coefficient of cubic convolution (Keys, 1981) that ATen uses


@dataclass(frozen=True)
class Resampling:
    """`size` inputs become `count` outputs; `scale` is what the user gave (outputs per input), if ATen would use it.

    `kernel` says which of ATen's: those for the nearest input differ in what they round, and the last two use fp32.
    """

    mode: ResizeMode
    size: int
    count: int
    scale: float | None
    align_corners: bool
    real: type[np.float32] | type[np.float64]
    kernel: Kernel = "contiguous"

    @property
    def step(self) -> Any:
        """How many inputs one output moves on."""
        real = self.real if self.kernel == "contiguous" else np.float32
        if self.align_corners:
            return real(self.size - 1) / real(self.count - 1) if self.count > 1 else real(0)
        return real(1.0 / self.scale) if self.scale else real(self.size) / real(self.count)

    @property
    def identity(self) -> bool:
        """Whether every output is the input at its own place."""
        copied = self.mode == "linear" or (self.mode == "nearest" and self.kernel == "channels_last")
        return self.size == self.count and (copied or self.step == 1)

    @property
    def factor(self) -> int | None:
        """The power of two by which the dim grows, or None. Then positions are exact wherever a part starts."""
        factor = self.count // self.size
        exact = not self.align_corners and factor & (factor - 1) == 0 and self.step * factor == 1
        return factor if exact and self.count == factor * self.size else None

    def taps(self, out: Interval) -> tuple[np.ndarray, np.ndarray | None]:
        """The inputs that each of the outputs `out` reads [O, T] and their weights (none: one tap, taken as it is)."""
        o = np.arange(*out)
        if self.identity:
            return o[:, None], None
        if self.mode in ("nearest", "nearest-exact"):
            return self._nearest(o)[:, None], None
        position = self.step * o.astype(self.real) if self.align_corners else self._centred(o)
        if self.mode == "linear":
            position = np.maximum(position, self.real(0))
        first = np.minimum(np.floor(position.astype(np.float32)).astype(np.int64), self.size - 1)
        behind = np.clip(position - first, 0, 1).astype(self.real)
        if self.mode == "linear":
            weights = np.stack([1 - behind, behind], 1)
            return np.minimum(first[:, None] + np.arange(2), self.size - 1), weights
        return np.clip(first[:, None] + np.arange(-1, 3), 0, self.size - 1), cubic_weights(behind)

    def _nearest(self, o: np.ndarray) -> np.ndarray:
        if self.mode == "nearest" and self.kernel == "channels_last" and self.count == 2 * self.size:
            return o // 2  # whatever the scale
        if self.mode == "nearest":
            position = self.step * o.astype(self.step.dtype)
        elif self.kernel == "contiguous":
            position = self._centred(o) + self.real(0.5)
        else:
            position = (o + 0.5) * np.float64(self.step)
        return np.minimum(np.floor(position.astype(np.float32)).astype(np.int64), self.size - 1)

    def _centred(self, o: np.ndarray) -> np.ndarray:
        """Where the centres of outputs lie. In fp64 the product of two fp32 numbers is exact: one rounding is left."""
        return (np.float64(self.step) * (o + 0.5) - 0.5).astype(self.real)

    def reads(self, out: Interval) -> Interval:
        """The hull of the inputs that `out` reads, on any device and in any memory format."""
        if out[0] >= out[1]:
            return 0, 0
        ends = [way.taps((end, end + 1))[0] for way in self.ways() for end in (out[0], out[1] - 1)]
        return min(int(end.min()) for end in ends), max(int(end.max()) for end in ends) + 1

    def by(self, kernel: Kernel) -> "Resampling":
        """The same, as `kernel` does it."""
        return self if self.mode in ("linear", "cubic") else replace(self, kernel=kernel)

    def ways(self) -> set["Resampling"]:
        """All ways in which ATen may do it."""
        return {self.by("contiguous"), self.by("channels_last"), self.by("cuda")}


def cubic_weights(t: np.ndarray) -> np.ndarray:
    """The weights [O, 4] of the inputs around a position that lies `t` behind the second of them."""

    def near(x: np.ndarray) -> np.ndarray:
        return ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1

    def far(x: np.ndarray) -> np.ndarray:
        return ((CUBIC * x - 5 * CUBIC) * x + 8 * CUBIC) * x - 4 * CUBIC

    return np.stack([far(t + 1), near(t), near(1 - t), far(2 - t)], 1)


@lru_cache(maxsize=1024)
def resampling_taps(resampling: Resampling, out: Interval, read: Interval, device: torch.device) -> Taps:
    """The taps of outputs `out` into a tensor that holds the inputs `read`."""
    index, weights = resampling.taps(out)
    return Taps.of(index - read[0], weights, read[1] - read[0], device)
