"""Padding under chosen splits."""

import pytest
import torch

from .fixed_split import check_split, node_for, reads

aten = torch.ops.aten


def image(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("pads", [(1, 2, 3, 1), (-1, 2, 0, -3), (4, 4, 5, 5)])
def test_every_mode(mode: str, pads: tuple[int, ...]) -> None:
    for split in ({"h": 2}, {"h": 5, "w": 1}, {"w": 3, "h": 2}):
        check_split(aten.pad.default, image(2, 3, 8, 6), list(pads), mode, split=split)


def test_a_part_that_is_padding_only_reads_what_it_shows() -> None:
    node, _ = node_for(aten.pad.default, image(1, 1, 8, 4), [0, 0, 4, 0], "reflect")
    assert reads(node, h=(0, 3))[0].intervals[2] == (2, 5)
    node, _ = node_for(aten.pad.default, image(1, 1, 8, 4), [0, 0, 4, 0], "replicate")
    assert reads(node, h=(0, 3))[0].intervals[2] == (0, 1)
    node, _ = node_for(aten.pad.default, image(1, 1, 8, 4), [0, 0, 4, 0], "constant")
    assert reads(node, h=(0, 3))[0].empty


def test_inner_parts_read_no_more_than_they_write() -> None:
    for mode in ("constant", "reflect", "replicate", "circular"):
        node, _ = node_for(aten.pad.default, image(1, 1, 12, 4), [0, 0, 2, 2], mode)
        assert reads(node, h=(4, 8))[0].intervals[2] == (2, 6)


def test_circular_padding_wraps_on_the_outer_parts() -> None:
    node, _ = node_for(aten.pad.default, image(1, 1, 12, 4), [0, 0, 2, 0], "circular")
    assert reads(node, h=(0, 2))[0].intervals[2] == (10, 12)
    assert reads(node, h=(0, 4))[0].intervals[2] == (0, 12)


def test_constant_padding_of_channels_and_samples() -> None:
    check_split(aten.constant_pad_nd.default, image(2, 3, 4), [1, 1, 2, 0, 1, 1], 7.0, split={"n": 2, "c": 3})


def test_padding_of_booleans_and_of_the_default_value() -> None:
    check_split(aten.pad.default, image(1, 2, 6) > 0, [2, 2], split={"w": 3})


def test_a_part_that_is_not_padded_still_gets_its_gradient() -> None:
    check_split(aten.pad.default, image(4, 2, 3, 3), [0, 0, 0, 0], "constant", split={"n": 2})
