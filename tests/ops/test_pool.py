"""Pooling under chosen splits: what the random contract meets too rarely to rely on."""

import pytest
import torch

from halocline.errors import PlanError
from halocline.ops import rule_for

from .fixed_split import check_split, node_for, reads

aten = torch.ops.aten


def image(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_resnet_stem_pooling(parts: int, ceil_mode: bool) -> None:
    check_split(aten.max_pool2d.default, image(2, 3, 17, 12), [3, 3], [2, 2], [1, 1], [1, 1], ceil_mode,
                split={"h": parts})  # fmt: skip


def test_stem_pooling_reads_one_halo_row() -> None:
    node, _ = node_for(aten.max_pool2d.default, image(1, 1, 16, 16), [3, 3], [2, 2], [1, 1])
    assert reads(node, h=(0, 4))[0].intervals[2] == (0, 8)
    assert reads(node, h=(4, 8))[0].intervals[2] == (7, 16)


def test_of_equal_maxima_across_a_cut_the_first_gets_the_gradient() -> None:
    check_split(aten.max_pool2d.default, torch.ones(1, 1, 9, 9, dtype=torch.float64), [3, 3], [1, 1], [1, 1],
                split={"h": 3, "w": 2})  # fmt: skip


@pytest.mark.parametrize("output", [0, 1])
def test_indices_are_global(output: int) -> None:
    x = image(2, 2, 7, 9, 8)
    check_split(aten.max_pool3d_with_indices.default, x, [3, 2, 2], [2, 1, 2], [1, 0, 1], [1, 2, 1], True,
                split={"d": 2, "h": 2, "w": 2}, output=output)  # fmt: skip


def test_index_of_a_window_of_minus_infinities_is_its_first_entry_in_the_tensor() -> None:
    x = torch.full((1, 1, 6, 6), -torch.inf, dtype=torch.float64)
    check_split(aten.max_pool2d_with_indices.default, x, [3, 3], [1, 1], [1, 1], split={"h": 3}, output=1)


def test_integers_are_padded_with_their_lowest_value() -> None:
    x = -torch.arange(1, 82).view(1, 1, 9, 9)
    check_split(aten.max_pool2d.default, x, [3, 3], [1, 1], [1, 1], split={"h": 3})


@pytest.mark.parametrize("include_pad", [False, True])
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_average_counts_in_the_global_tensor(include_pad: bool, ceil_mode: bool) -> None:
    for size in (7, 8, 9, 10):  # the last window of ceil_mode covers another count each time
        check_split(aten.avg_pool2d.default, image(1, 2, size, 7), [4, 3], [3, 2], [2, 1], ceil_mode, include_pad,
                    split={"h": 2, "w": 2})  # fmt: skip


def test_average_of_volumes_with_parts_smaller_than_the_kernel() -> None:
    check_split(aten.avg_pool3d.default, image(1, 1, 5, 4, 4), [3, 3, 3], [2, 1, 1], [1, 1, 1], split={"d": 3})


def test_average_of_integers_is_refused() -> None:
    node, _ = node_for(aten.avg_pool2d.default, torch.ones(1, 1, 4, 4, dtype=torch.int64), [2, 2])
    with pytest.raises(PlanError, match="integers are not supported: convert to float"):
        rule_for(node).signature(node)


def test_more_ranks_than_outputs() -> None:
    check_split(aten.max_pool1d.default, image(2, 3, 9), [4], [4], split={"w": 5})


def test_channels_last_stays() -> None:
    x = image(1, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    check_split(aten.max_pool2d.default, x, [3, 3], [2, 2], [1, 1], split={"h": 2})


def test_unpooling_splits_samples_and_channels() -> None:
    values, where = aten.max_pool2d_with_indices(image(2, 3, 6, 6), [2, 2])
    check_split(aten.max_unpool2d.default, values, where, [6, 6], split={"n": 2, "c": 3})
