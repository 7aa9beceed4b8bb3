"""Sliding windows: which inputs an interval of outputs reads, and how far it reads beyond the tensor."""

from dataclasses import dataclass

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

    def reached_from(self, interval: Interval) -> Interval:
        """The outputs that may read a point of `interval` (unclipped)."""
        first = -((self.dilation * (self.kernel - 1) - self.padding - interval[0]) // self.stride)
        return first, max(first, (interval[1] - 1 + self.padding) // self.stride + 1)

    def padding_for(self, held: Interval, out: Interval) -> tuple[int, int, int]:
        """How to pad the inputs `held` so that a kernel makes exactly the outputs `out`.

        Returns what the kernel is to pad at both ends, which needs no copy, and what must be padded (or, where
        negative, cut off) before at the start and at the end.
        """
        start, stop = self.spans(out)
        before, behind = held[0] - start, stop - held[1]
        if 0 <= before - behind < self.stride and before >= 0:
            return before, 0, 0  # the kernel pads the end by too much, but by less than one more output takes
        both = max(0, min(before, behind))
        return both, before - both, behind - both
