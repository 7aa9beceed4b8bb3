"""Running sums and sorting: every dim but the one they go along may be split."""

import pytest
import torch

from halocline.ops import rule_for

from .fixed_split import check_split, node_for

aten = torch.ops.aten


def image(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_the_dim_itself_stays_whole() -> None:
    node, _ = node_for(aten.cumsum.default, image(4, 5, 6), -2)
    assert set(rule_for(node).signature(node).indices) == {"n", "w"}


@pytest.mark.parametrize("output", [0, 1])
def test_values_and_numbers(output: int) -> None:
    for split in ({"n": 3}, {"n": 2, "w": 2}):
        check_split(aten.topk.default, image(4, 5, 6), 2, 1, split=split, output=output)
        check_split(aten.sort.stable, image(4, 5, 6), stable=True, dim=1, split=split, output=output)
        check_split(aten.median.dim, image(4, 5, 6), 1, split=split, output=output)


def test_halves_of_channels() -> None:
    check_split(aten.glu.default, image(4, 6, 5), 1, split={"n": 2, "w": 3})


def test_classes_as_ones_by_scatter() -> None:
    target = torch.randint(4, (2, 1, 5, 3))
    for split in ({"h": 3}, {"n": 2, "w": 2}):
        check_split(aten.scatter.value, torch.zeros(2, 4, 5, 3), 1, target, 1.0, split=split)


def test_dims_where_the_numbers_are_fewer_stay_whole() -> None:
    index = torch.zeros(2, 3, 6, dtype=torch.int64)
    node, _ = node_for(aten.scatter.value, image(4, 5, 6), 1, index, 1.0)
    assert set(rule_for(node).signature(node).indices) == {"w"}
    check_split(aten.scatter.value, image(4, 5, 6), 1, index, 1.0, split={"w": 4})


def test_inputs_of_different_ranks_stay_together() -> None:
    node, _ = node_for(aten.cosine_similarity.default, image(5, 3), image(4, 5, 3), -1)
    assert not rule_for(node).signature(node).indices
