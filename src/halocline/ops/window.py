"""Sliding windows: which inputs an interval of outputs reads, and how far it reads beyond the tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..region import Interval, meet


@dataclass(frozen=True)
class Window:
    """A window of `kernel` taps `dilation` apart that moves by `stride` and starts `padding` before the tensor."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    size: int  # of the input dim

    def spans(self, out: Interval) -> Interval:
        """What outputs `out` read, unclipped: what lies outside the tensor is padding."""
        if out[1] <= out[0]:
            return 0, 0
        reach = self.dilation * (self.kernel - 1) + 1
        return out[0] * self.stride - self.padding, (out[1] - 1) * self.stride - self.padding + reach

    def reads(self, out: Interval) -> Interval:
        """What outputs `out` read of the tensor."""
        return meet((0, self.size), self.spans(out))

    def overhang(self, out: Interval) -> tuple[int, int]:
        """How far outputs `out` read before the tensor's start and behind its end."""
        start, stop = self.spans(out)
        return max(0, min(stop, 0) - start), max(0, stop - max(start, self.size))


def pad_overhang(x: Tensor, overhangs: Sequence[tuple[int, int]], value: float) -> tuple[Tensor, list[int]]:
    """`x` padded with `value` over its last dims where `overhangs` differ between the two ends.

    Returns also the padding still to be applied to both ends alike, which most kernels do without a copy.
    """
    alike = [0 if 0 in x.shape else min(before, behind) for before, behind in overhangs]
    rest = [pad for (before, behind), both in zip(overhangs, alike) for pad in (behind - both, before - both)]
    if any(rest):
        x = F.pad(x, rest[::-1], value=value)
    return x, alike
