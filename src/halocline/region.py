"""`Region`: a half-open box in global coordinates. All index arithmetic on boxes is here."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Self

Interval = tuple[int, int]


def meet(a: Interval, b: Interval) -> Interval:
    """What two intervals share; where they share nothing, an empty interval inside `a`'s bounds."""
    start = min(max(a[0], b[0]), a[1])
    return start, max(start, min(a[1], b[1]))


def balanced(size: int, parts: int) -> tuple[Interval, ...]:
    """`range(size)` in `parts` intervals; the first `size mod parts` of them hold one more.

    >>> balanced(7, 3)
    ((0, 3), (3, 5), (5, 7))
    """
    small, larger = divmod(size, parts)
    starts = [i * small + min(i, larger) for i in range(parts + 1)]
    return tuple(zip(starts[:-1], starts[1:]))


def chunked(size: int, parts: int) -> tuple[Interval, ...]:
    """`range(size)` in `parts` intervals as `torch.chunk` cuts it: all as long as the longest, the last ones less.

    >>> chunked(5, 4)
    ((0, 2), (2, 4), (4, 5), (5, 5))
    """
    longest = -(-size // parts)
    cuts = [min(i * longest, size) for i in range(parts + 1)]
    return tuple(zip(cuts[:-1], cuts[1:]))


DIVISIONS = {"balanced": balanced, "chunk": chunked}


@dataclass(frozen=True)
class Region:
    """A half-open box `((start, stop), ...)` in global coordinates, one interval for each tensor dim.

    >>> a, b = Region(((0, 4), (2, 9))), Region(((3, 6), (0, 5)))
    >>> a.meet(b), a.meet(b).within(a)
    (Region(((3, 4), (2, 5))), (slice(3, 4, None), slice(0, 3, None)))
    """

    intervals: tuple[Interval, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Self:
        return cls(tuple((0, size) for size in shape))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.intervals)

    @cached_property
    def size(self) -> int:
        """The number of points in the box."""
        return prod([stop - start for start, stop in self.intervals])

    @cached_property
    def empty(self) -> bool:
        return any(stop <= start for start, stop in self.intervals)

    def meet(self, other: "Region") -> "Region":
        """The box that both share (of size 0 where they share nothing)."""
        return Region(tuple(meet(a, b) for a, b in zip(self.intervals, other.intervals, strict=True)))

    def holds(self, other: "Region") -> bool:
        """Whether every point of `other` is in this box."""
        return other.empty or all(
            a[0] <= b[0] and b[1] <= a[1] for a, b in zip(self.intervals, other.intervals, strict=True)
        )

    def within(self, outer: "Region") -> tuple[slice, ...]:
        """The slices that cut this box out of a tensor that holds `outer`."""
        return tuple(
            slice(start - base, stop - base)
            for (start, stop), (base, _) in zip(self.intervals, outer.intervals, strict=True)
        )

    def __repr__(self) -> str:
        return f"Region({self.intervals})"

    def __str__(self) -> str:
        return "[" + ", ".join(f"{start}:{stop}" for start, stop in self.intervals) + "]"
