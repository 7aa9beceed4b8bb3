"""Global index arithmetic: meshes, boxes, and who owns what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halocline.errors import PlanError
from halocline.layout import DimSplit, Layout
from halocline.mesh import Mesh, prime_mesh
from halocline.region import Region, balanced

MESH = Mesh((("node", 2), ("core", 3)))


def test_ranks_count_along_the_last_axis_first() -> None:
    assert [MESH.coords(rank) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_groups_and_parts_follow_the_order_of_the_axes_given() -> None:
    assert MESH.group(4, ("core",)) == (3, 4, 5)
    assert MESH.group(4, ("node",)) == (1, 4)
    assert MESH.part(4, ("node", "core")) == 4
    assert MESH.part(4, ("core", "node")) == 3


@given(st.integers(1, 64), st.data())
def test_moved_inverts_part(ranks: int, data: st.DataObject) -> None:
    mesh = prime_mesh(ranks)
    assert mesh.size == ranks
    axes = tuple(data.draw(st.permutations(mesh.names)))[: data.draw(st.integers(0, len(mesh.names)))]
    rank = data.draw(st.integers(0, ranks - 1))
    part = data.draw(st.integers(0, mesh.parts(axes) - 1))
    moved = mesh.moved(rank, axes, part)
    assert mesh.part(moved, axes) == part
    others = tuple(axis for axis in mesh.names if axis not in axes)
    assert mesh.part(moved, others) == mesh.part(rank, others)


@given(st.integers(0, 50), st.integers(1, 12))
def test_balanced_tiles_and_puts_the_larger_parts_first(size: int, parts: int) -> None:
    cuts = balanced(size, parts)
    lengths = [stop - start for start, stop in cuts]
    assert cuts[0][0] == 0 and cuts[-1][1] == size and sum(lengths) == size
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


interval = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda pair: (min(pair), max(pair)))


@given(interval, interval, interval, interval)
def test_meet_is_the_common_points(a: tuple, b: tuple, c: tuple, d: tuple) -> None:
    one, two = Region((a, b)), Region((c, d))
    points = {(i, j) for i in range(*a) for j in range(*b)} & {(i, j) for i in range(*c) for j in range(*d)}
    common = one.meet(two)
    assert {(i, j) for i in range(*common.intervals[0]) for j in range(*common.intervals[1])} == points
    assert common.size == len(points)
    assert one.holds(two) == (two.size == common.size)


def test_layout_owners_tile_what_is_wanted() -> None:
    layout = Layout.split(MESH, (5, 7), {1: ("core",)})
    assert layout.region(4) == Region(((0, 5), (3, 5)))
    owners = dict(layout.owners(Region(((1, 3), (2, 6))), near=3))
    assert owners == {3: Region(((1, 3), (2, 3))), 4: Region(((1, 3), (3, 5))), 5: Region(((1, 3), (5, 6)))}


def test_an_axis_cannot_split_two_dims() -> None:
    with pytest.raises(PlanError, match="an axis splits two dims"):
        Layout.split(MESH, (4, 4), {0: ("node",), 1: ("node",)})


def test_parts_must_tile() -> None:
    with pytest.raises(PlanError, match="do not tile"):
        DimSplit(("node",), ((0, 2), (3, 4)))
