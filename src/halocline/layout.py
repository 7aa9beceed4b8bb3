"""`Layout`: which region of a value every rank owns."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from .errors import PlanError
from .mesh import Mesh
from .region import DIVISIONS, Interval, Region


@dataclass(frozen=True)
class DimSplit:
    """How one dim is divided: the mesh axes that divide it, and the interval of each part, in part order.

    The parts tile the dim without overlap; some may be empty. No axes: one part, the whole dim.
    """

    axes: tuple[str, ...]
    parts: tuple[Interval, ...]

    def __post_init__(self) -> None:
        for (_, stop), (start, _) in zip(self.parts, self.parts[1:]):
            if start != stop:
                raise PlanError(f"parts {self.parts} of a split over {self.axes} do not tile the dim")

    @cached_property
    def size(self) -> int:
        return self.parts[-1][1]

    def meeting(self, want: Interval) -> Iterator[int]:
        """The numbers of the parts that share a point with `want`."""
        for number, (start, stop) in enumerate(self.parts):
            if max(start, want[0]) < min(stop, want[1]):
                yield number


def even(mesh: Mesh, axes: tuple[str, ...], size: int, division: str = "balanced") -> DimSplit:
    """`size` divided over `axes`: as evenly as possible, or (`"chunk"`) as `torch.chunk` does."""
    return DimSplit(axes, DIVISIONS[division](size, mesh.parts(axes)))


@dataclass(frozen=True)
class Layout:
    """For each dim of a value the mesh axes that split it, and where. Axes not named hold replicas.

    `layout.region(rank)` is what `rank` owns; the regions of the ranks that differ in the named axes tile the value.
    """

    mesh: Mesh
    dims: tuple[DimSplit, ...]

    def __post_init__(self) -> None:
        named = [axis for dim in self.dims for axis in dim.axes]
        if len(set(named)) != len(named):
            raise PlanError(f"layout {self}: an axis splits two dims of one value")
        for dim in self.dims:
            if len(dim.parts) != self.mesh.parts(dim.axes):
                raise PlanError(f"layout {self}: {len(dim.parts)} parts over axes {dim.axes} of mesh {self.mesh}")

    @classmethod
    def split(
        cls, mesh: Mesh, shape: tuple[int, ...], axes: Mapping[int, tuple[str, ...]], division: str = "balanced"
    ) -> "Layout":
        """The layout of a value of `shape` whose dim `d` is split over `axes[d]`."""
        return cls(mesh, tuple(even(mesh, axes.get(dim, ()), size, division) for dim, size in enumerate(shape)))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(dim.size for dim in self.dims)

    @cached_property
    def axes(self) -> frozenset[str]:
        """The mesh axes that split the value."""
        return frozenset(axis for dim in self.dims for axis in dim.axes)

    def region(self, rank: int) -> Region:
        """What `rank` owns."""
        part = self.mesh.part
        return Region(tuple([dim.parts[part(rank, dim.axes) if dim.axes else 0] for dim in self.dims]))

    def owners(self, want: Region, near: int) -> Iterator[tuple[int, Region]]:
        """The ranks that own the points of `want`, each with its share; of several replicas, the one `near` rank's."""
        if want.empty:
            return
        for parts in product(*(dim.meeting(box) for dim, box in zip(self.dims, want.intervals, strict=True))):
            rank = near
            for dim, part in zip(self.dims, parts):
                rank = self.mesh.moved(rank, dim.axes, part)
            yield rank, want.meet(Region(tuple(dim.parts[part] for dim, part in zip(self.dims, parts))))

    def __str__(self) -> str:
        return (
            "("
            + ", ".join(f"{dim.size}/{'*'.join(dim.axes)}" if dim.axes else str(dim.size) for dim in self.dims)
            + ")"
        )
