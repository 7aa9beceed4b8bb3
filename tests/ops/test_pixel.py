"""Pixel and channel shuffles under chosen splits."""

import pytest
import torch

from .fixed_split import check_split, node_for, reads

aten = torch.ops.aten


def image(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("split", [{"h": 3}, {"w": 2, "c": 2}, {"n": 2, "h": 2}])
def test_shuffle_and_unshuffle(split: dict[str, int]) -> None:
    check_split(aten.pixel_shuffle.default, image(2, 18, 5, 4), 3, split=split)
    check_split(aten.pixel_unshuffle.default, image(2, 2, 15, 12), 3, split=split)


def test_parts_of_one_image_are_parts_of_the_other() -> None:
    node, _ = node_for(aten.pixel_unshuffle.default, image(1, 2, 12, 12), 2)
    assert reads(node, h=(2, 4), c=(1, 2))[0].intervals == ((0, 1), (1, 2), (4, 8), (0, 12))


def test_channel_shuffle_splits_all_but_channels() -> None:
    check_split(aten.channel_shuffle.default, image(2, 6, 5, 4), 3, split={"n": 2, "h": 2, "w": 2})
