"""`Mesh`: named axes over the ranks. Pure data, no communicator inside."""

from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

from .errors import PlanError


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes over all ranks, the slowest axis first.

    >>> mesh = Mesh((("node", 2), ("core", 3)))
    >>> mesh.size, mesh.coords(4), mesh.group(4, ("core",))
    (6, (1, 1), (3, 4, 5))
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.axes) or any(size < 1 for _, size in self.axes):
            raise PlanError(f"mesh {self.axes}: axes need different names and sizes of at least 1")

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @cached_property
    def size(self) -> int:
        """How many ranks there are."""
        return prod(self.sizes)

    @cached_property
    def _strides(self) -> dict[str, tuple[int, int]]:
        """For each axis the step in rank from one coordinate to the next, and its size."""
        strides, step = {}, 1
        for name, size in reversed(self.axes):
            strides[name] = (step, size)
            step *= size
        return strides

    def coord(self, rank: int, axis: str) -> int:
        step, size = self._strides[axis]
        return rank // step % size

    def coords(self, rank: int) -> tuple[int, ...]:
        return tuple(self.coord(rank, name) for name in self.names)

    def parts(self, axes: tuple[str, ...]) -> int:
        """Into how many parts `axes` together divide something."""
        return prod([self._strides[axis][1] for axis in axes])

    def part(self, rank: int, axes: tuple[str, ...]) -> int:
        """Which of these parts is `rank`'s; the first of `axes` varies slowest."""
        index = 0
        for axis in axes:
            step, size = self._strides[axis]
            index = index * size + rank // step % size
        return index

    def moved(self, rank: int, axes: tuple[str, ...], part: int) -> int:
        """The rank that holds `part` along `axes` and has `rank`'s coordinates elsewhere."""
        for axis in reversed(axes):
            step, size = self._strides[axis]
            part, coord = divmod(part, size)
            rank += (coord - rank // step % size) * step
        return rank

    @cache  # noqa: B019 - asked for again in every step; a mesh lives as long as its program
    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only, itself included, in part order."""
        return tuple(self.moved(rank, axes, part) for part in range(self.parts(axes)))

    def ordered(self, axes: frozenset[str]) -> tuple[str, ...]:
        """`axes` in mesh order."""
        return tuple(name for name in self.names if name in axes)

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.axes) or "1 rank"


def prime_mesh(ranks: int) -> Mesh:
    """The mesh of `ranks` ranks whose axes `r0`, `r1`, ... have the prime factors of `ranks` as sizes, largest last.

    Any way to divide the ranks by whole factors is then an assignment of axes.
    """
    factors, rest, factor = [], ranks, 2
    while rest > 1:
        while rest % factor == 0:
            factors.append(factor)
            rest //= factor
        factor += 1
    return Mesh(tuple((f"r{i}", size) for i, size in enumerate(factors)))
