"""Flips, turns, rolls, differences and triangles under chosen splits."""

import pytest
import torch

from .fixed_split import check_split, node_for, reads

aten = torch.ops.aten


def image(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_flip_of_a_split_dim(parts: int) -> None:
    check_split(aten.flip.default, image(1, 2, 3, 7), [-1], split={"w": parts})
    check_split(aten.flip.default, image(1, 2, 5, 7), [2, 3], split={"h": 2, "w": parts})


def test_a_flipped_part_reads_the_other_end() -> None:
    node, _ = node_for(aten.flip.default, image(2, 9), [1])
    assert reads(node, c=(0, 2))[0].intervals[1] == (7, 9)


@pytest.mark.parametrize("k", [0, 1, 2, 3, -1])
def test_quarter_turns(k: int) -> None:
    for split in ({"h": 3}, {"w": 2}, {"h": 2, "w": 2}):
        check_split(aten.rot90.default, image(1, 2, 5, 7), k, [2, -1], split=split)


@pytest.mark.parametrize("shift", [1, -1, 3, 8, -20])
def test_roll_of_a_split_dim(shift: int) -> None:
    for parts in (1, 2, 4):
        check_split(aten.roll.default, image(1, 2, 7, 3), [shift], [-2], split={"h": parts})


def test_only_the_part_that_wraps_reads_the_whole_dim() -> None:
    node, _ = node_for(aten.roll.default, image(12), [2], [0])
    assert [reads(node, n=part)[0].intervals[0] for part in ((0, 2), (0, 4), (4, 8))] == [(10, 12), (0, 12), (2, 6)]


def test_differences_have_a_halo_on_one_side() -> None:
    node, _ = node_for(aten.diff.default, image(2, 9), 2, 1)
    assert reads(node, c=(2, 4))[0].intervals[1] == (2, 6)
    check_split(aten.diff.default, image(2, 9), 2, 1, split={"c": 5})


@pytest.mark.parametrize("diagonal", [-3, 0, 2])
def test_triangles(diagonal: int) -> None:
    for target in (aten.tril.default, aten.triu.default):
        check_split(target, image(2, 5, 7), diagonal, split={"c": 2, "w": 3})
