"""Costs of moving a value between many layouts and many needs at once: `movement`, vectorised over pairs.

For one rank, dims are independent but for their product: along each dim a need shares with the owner's parts a number
of points and of parts, of which those on the rank's own part, and on parts reached within each level of the
interconnect, are known from the interval alone. Bytes and messages on a level are differences of products over dims.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from ..layout import DimSplit, Layout
from ..mesh import Mesh
from ..region import Region, balanced
from .collective import allreduce_s
from .machine import Machine
from .movement import CALLS_APART

Array = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Pairs:
    """For every owner layout (rows) and need (columns): seconds there and back, whether it is in place or local."""

    there_s: Array
    back_s: Array
    in_place: NDArray[np.bool_]
    local: NDArray[np.bool_]
    apart: NDArray[np.bool_]  # the halo stays apart from the own block
    shared_bytes: Array  # what is needed of the own block


@dataclass(frozen=True)
class Beside:
    """A reader that adds its halo apart where its block is large: along which dims, and its times for each need."""

    dims: tuple[int, ...]
    forward_s: Array
    backward_s: Array
    least_bytes: int


class Owners:
    """The layouts a value may have, as one rank sees them."""

    def __init__(self, machine: Machine, layouts: Sequence[Layout], rank: int, itemsize: int) -> None:
        self.machine, self.layouts, self.rank, self.itemsize = machine, layouts, rank, itemsize
        self.mesh = layouts[0].mesh
        self.levels = {axis: machine.level_of_axis(self.mesh, axis) for axis in self.mesh.names}

    @cached_property
    def sizes(self) -> Array:
        """Bytes of the rank's own region under each layout."""
        return np.array([layout.region(self.rank).size * self.itemsize for layout in self.layouts], dtype=np.float64)

    @cached_property
    def block_bytes(self) -> Array:
        """Bytes of an even share of the value under each layout."""
        found = [
            prod(layout.shape) * self.itemsize // self.mesh.parts(self.mesh.ordered(layout.axes))
            for layout in self.layouts
        ]
        return np.array(found, dtype=np.float64)

    @cached_property
    def masks(self) -> Whole:
        """The axes that split the value under each layout, as bits."""
        return np.array([axes_mask(self.mesh, layout.axes) for layout in self.layouts], dtype=np.int64)

    @cached_property
    def distinct(self) -> list[tuple[list[DimSplit], Whole]]:
        """For each dim its different splits, and which of them each layout has."""
        found = []
        for dim in range(len(self.layouts[0].dims)):
            numbers: dict[int, int] = {}
            splits: list[DimSplit] = []
            which = []
            for layout in self.layouts:
                split = layout.dims[dim]
                if id(split) not in numbers:
                    numbers[id(split)] = len(splits)
                    splits.append(split)
                which.append(numbers[id(split)])
            found.append((splits, np.array(which, dtype=np.int64)))
        return found

    def blocks(self, split: DimSplit) -> list[tuple[int, int]]:
        """For level -1 (the rank's own part) and each level: the first and the last part held within the level."""
        own = self.mesh.part(self.rank, split.axes)
        found = [(own, own)]
        for level in range(len(self.machine.levels)):
            inner = 1
            for axis in split.axes:
                if self.levels[axis] <= level:
                    inner *= self.mesh.parts((axis,))
            first = own // inner * inner
            found.append((first, first + inner - 1))
        return found


def axes_mask(mesh: Mesh, axes: frozenset[str]) -> int:
    return sum(1 << number for number, name in enumerate(mesh.names) if name in axes)


def pair_costs(
    owners: Owners, needs: Sequence[Region], over: Sequence[frozenset[str]], carries: bool, beside: Beside | None = None
) -> Pairs:
    """What it costs the owners' rank to get each of `needs` from each layout, and to give its gradient back.

    `over` are the axes along which the reader of each need is split; `carries` says whether there is a gradient.
    """
    machine, local = owners.machine, owners.machine.local
    intervals = np.array([need.intervals for need in needs], dtype=np.int64).reshape(len(needs), -1, 2)
    over_masks = np.array([axes_mask(owners.mesh, axes) for axes in over], dtype=np.int64)
    dims = [
        _along_dim(owners, splits, which, intervals[:, dim, 0], intervals[:, dim, 1], over_masks)
        for dim, (splits, which) in enumerate(owners.distinct)
    ]
    if not dims:  # a scalar, which every rank holds
        nothing = np.zeros((len(owners.layouts), len(needs)))
        back_s = nothing + _replica_sums(owners, over_masks) if carries else nothing
        here = np.ones(nothing.shape, dtype=np.bool_)
        return Pairs(nothing, back_s, here, here, ~here, nothing + owners.itemsize)
    size = np.array([need.size for need in needs], dtype=np.float64)
    in_place = np.logical_and.reduce([dim.same for dim in dims]) | (size[None, :] == 0)
    messages, there, handling = _moving(
        machine, [dim.points for dim in dims], [dim.parts for dim in dims], owners.itemsize
    )
    is_local = in_place | (messages <= 0)
    there[in_place] = handling[in_place] = 0.0
    buffer = local.overhead_s + 2 * size[None, :] * owners.itemsize * local.memory_seconds_per_byte
    there_s = there + handling + np.where(is_local, 0.0, buffer)
    back, back_messages, back_handling = (np.zeros_like(there) for _ in range(3))
    back_s = np.zeros_like(there)
    if carries:
        back_messages, back, back_handling = _moving(
            machine, [dim.back_points for dim in dims], [dim.back_parts for dim in dims], owners.itemsize
        )
        back_s = back + back_handling + local.overhead_s + 2 * owners.sizes[:, None] * local.memory_seconds_per_byte
        back_s[in_place] = 0.0
    apart = np.zeros_like(is_local)
    if beside is not None:
        apart = ~is_local & (owners.block_bytes >= beside.least_bytes)[:, None]
        for number, dim in enumerate(dims):
            apart &= dim.same if number not in beside.dims else True
        there_s = np.where(apart, handling + _beside(machine, there, messages, beside.forward_s), there_s)
        back_s = np.where(apart, back_handling + _beside(machine, back, back_messages, beside.backward_s), back_s)
    if carries:
        back_s = back_s + _replica_sums(owners, over_masks)
    shared = np.prod([dim.points[0] for dim in dims], axis=0) * owners.itemsize
    return Pairs(there_s, back_s, in_place, is_local, apart, shared)


def _beside(machine: Machine, moving_s: Array, messages: Array, computing_s: Array) -> Array:
    """`movement.beside_s` for all pairs, without the handling of messages."""
    hidden = np.minimum(machine.overlap * moving_s, computing_s[None, :])
    return moving_s - hidden + CALLS_APART * messages * machine.local.overhead_s / 2


def _moving(
    machine: Machine, points: list[list[Array]], parts: list[list[Array]], itemsize: int
) -> tuple[Array, Array, Array]:
    """Messages, the seconds they take and those of handling them, from the points and parts shared along each dim."""
    reach = [np.prod([dim[number] for dim in points], axis=0) for number in range(len(points[0]))]
    count = [np.prod([dim[number] for dim in parts], axis=0) for number in range(len(parts[0]))]
    moving, handling, local = np.zeros_like(reach[0]), np.zeros_like(reach[0]), machine.local
    for number, level in enumerate(machine.levels):
        messages = np.round(count[number + 1] - count[number])
        nbytes = (reach[number + 1] - reach[number]) * itemsize
        moving += messages * level.latency_s + nbytes * level.seconds_per_byte
        handling += messages * 2 * local.overhead_s + nbytes * 4 * local.memory_seconds_per_byte
    total = np.round(count[-1] - count[0])
    return total, moving, handling + np.where(total > 0, local.fetch_s, 0.0)


@dataclass(frozen=True)
class _Dim:
    """One dim of all layouts (rows) against all needs (columns): points and parts shared, cumulated over the levels."""

    points: list[Array]
    parts: list[Array]
    back_points: list[Array]
    back_parts: list[Array]
    same: NDArray[np.bool_]


def _along_dim(
    owners: Owners, splits: list[DimSplit], which: Whole, starts: Whole, stops: Whole, over_masks: Whole
) -> _Dim:
    mesh = owners.mesh
    low, high = _part_numbers(splits, starts), _part_numbers(splits, np.maximum(stops - 1, starts))
    total = np.array([len(split.parts) for split in splits])[:, None]
    fold = np.ones(low.shape)  # how many readers do the same work with what one owner holds
    for number, axis in enumerate(mesh.names):
        split_here = np.array([axis in split.axes for split in splits])[:, None]
        fold *= np.where(split_here & ((over_masks >> number & 1) == 0)[None, :], mesh.parts((axis,)), 1)
    share = np.where(fold >= total, 0.0, 1.0 / fold)
    blocks = np.array([owners.blocks(split) for split in splits])
    points: list[Array] = []
    parts: list[Array] = []
    same = np.ones(low.shape, dtype=bool)
    for number in range(blocks.shape[1]):
        first, last = blocks[:, number, 0], blocks[:, number, 1]
        begin = np.array([split.parts[i][0] for split, i in zip(splits, first)])[:, None]
        end = np.array([split.parts[i][1] for split, i in zip(splits, last)])[:, None]
        shared = np.maximum(np.minimum(stops, end) - np.maximum(starts, begin), 0)
        count = np.maximum(np.minimum(high, last[:, None]) - np.maximum(low, first[:, None]) + 1, 0)
        points.append(shared.astype(np.float64))
        parts.append(np.where(shared > 0, count, 0).astype(np.float64))
        if number == 0:
            same = (starts == begin) & (stops == end)
    back_points = [points[0] + np.maximum(p - points[0], 0) * share for p in points]
    back_parts = [parts[0] + np.ceil(np.maximum(p - parts[0], 0) * share) for p in parts]
    rows = [[table[which] for table in tables] for tables in (points, parts, back_points, back_parts)]
    return _Dim(rows[0], rows[1], rows[2], rows[3], same[which])


def _part_numbers(splits: list[DimSplit], points: Whole) -> Whole:
    """For each split (rows) the number of the part that holds each point."""
    scales = [_balanced_scale(split) for split in splits]
    scale = np.array([max(scale, 1) for scale in scales])[:, None]
    count = np.array([len(split.parts) for split in splits])[:, None]
    small, larger = np.divmod(np.array([split.size for split in splits])[:, None] // scale, count)
    at = points[None, :] // scale
    turn = larger * (small + 1)
    numbers = np.where(at < turn, at // (small + 1), larger + (at - turn) // np.maximum(small, 1))
    for row, known in enumerate(scales):
        if not known:
            bounds = np.array([start for start, _ in splits[row].parts], dtype=np.int64)
            numbers[row] = np.searchsorted(bounds, points, side="right") - 1
    return np.asarray(numbers, dtype=np.int64)


@lru_cache(maxsize=16384)
def _balanced_scale(split: DimSplit) -> int:
    """The number s for which the parts are those of `balanced(size / s)` times s; 0 if there is none."""
    scale = gcd(*(stop - start for start, stop in split.parts[:1] + split.parts[-1:]), split.size)
    if not scale or balanced(split.size // scale, len(split.parts))[-1][0] * scale != split.parts[-1][0]:
        return 0
    even = balanced(split.size // scale, len(split.parts))
    return scale if all(a * scale == c and b * scale == d for (a, b), (c, d) in zip(even, split.parts)) else 0


def _replica_sums(owners: Owners, over_masks: Whole) -> Array:
    """The sum of a gradient over replicas that fed different work."""
    axes = over_masks[None, :] & ~owners.masks[:, None]
    total = np.zeros(axes.shape)
    known: dict[tuple[int, float], float] = {}
    for row, size in enumerate(owners.sizes):
        masks, which = np.unique(axes[row], return_inverse=True)
        for mask in masks:
            if (mask, size) not in known:
                names = tuple(name for number, name in enumerate(owners.mesh.names) if mask >> number & 1)
                known[mask, size] = allreduce_s(owners.machine, owners.mesh, names, size)
        total[row] = np.array([known[mask, size] for mask in masks])[which]
    return total
