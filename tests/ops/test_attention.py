"""Attention under chosen splits."""

import pytest
import torch

from halocline.errors import PlanError
from halocline.ops import rule_for

from .fixed_split import check_split, node_for, reads

sdpa = torch.ops.aten.scaled_dot_product_attention.default


def image(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [3, 7, 9])
def test_query_rows_in_parts(rows: int, causal: bool) -> None:
    for split in ({"h": 3}, {"n": 2, "h": 2}, {"c": 3}):
        check_split(sdpa, image(2, 3, rows, 4), image(2, 3, 7, 4), image(2, 3, 7, 5), None, 0.0, causal, split=split)


def test_a_causal_part_reads_no_keys_behind_it() -> None:
    node, _ = node_for(sdpa, image(1, 2, 8, 4), image(1, 2, 8, 4), image(1, 2, 8, 4), None, 0.0, True)
    assert [region.intervals[2] for region in reads(node, h=(2, 5))] == [(2, 5), (0, 5), (0, 5)]


def test_query_heads_stay_with_the_key_head_they_share() -> None:
    args = image(2, 6, 5, 4), image(2, 2, 5, 4), image(2, 2, 5, 4)
    node, _ = node_for(sdpa, *args, enable_gqa=True)
    query, key, _ = reads(node, c=(1, 2))
    assert (query.intervals[1], key.intervals[1]) == ((3, 6), (1, 2))
    check_split(sdpa, *args, split={"c": 2, "h": 2}, enable_gqa=True)


def test_masks_of_every_shape() -> None:
    for shape in ((5, 6), (1, 6), (3, 5, 6), (2, 1, 1, 6)):
        mask = image(*shape)
        check_split(sdpa, image(2, 3, 5, 4), image(2, 3, 6, 4), image(2, 3, 6, 4), mask, split={"h": 2, "c": 2})


def test_dropout_is_refused() -> None:
    node, _ = node_for(sdpa, image(1, 2, 3), image(1, 2, 3), image(1, 2, 3), None, 0.1)
    with pytest.raises(PlanError, match=r"dropout_p=0\.1"):
        rule_for(node).signature(node)
