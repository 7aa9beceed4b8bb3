"""Arithmetic on the intervals and regions that rules read and write."""

from ..graph import TensorType
from ..region import Interval, Region


def scaled(interval: Interval, factor: int) -> Interval:
    """The interval of a dim that has `factor` entries for each of another dim's."""
    return interval[0] * factor, interval[1] * factor


def replaced(region: Region, dim: int, interval: Interval) -> Region:
    """`region` with another interval along `dim`."""
    return Region((*region.intervals[:dim], interval, *region.intervals[dim + 1 :]))


def nothing(type: TensorType) -> Region:
    """The read of an input whose values are not looked at (a tensor without dims is read all the same)."""
    return Region(((0, 0),) * len(type.shape))
