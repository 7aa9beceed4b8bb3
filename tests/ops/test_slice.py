"""Slices and gathers under chosen splits."""

import pytest
import torch

from halocline.errors import PlanError
from halocline.graph import Node, TensorType
from halocline.ops import rule_for

from .fixed_split import check_split, node_for, reads

aten = torch.ops.aten


def image(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bounds", [(1, -2), (-5, None), (None, 100), (3, 4), (2, 2)])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_slice_of_a_split_dim(bounds: tuple[int | None, int | None], step: int) -> None:
    check_split(aten.slice.Tensor, image(2, 3, 11, 4), 2, *bounds, step, split={"h": 4})


def test_a_crop_reads_its_own_interval() -> None:
    node, _ = node_for(aten.slice.Tensor, image(1, 1, 20, 4), 2, 3, -1, 2)
    assert reads(node, h=(2, 5))[0].intervals[2] == (7, 12)


def test_select_reads_one_entry() -> None:
    node, _ = node_for(aten.select.int, image(4, 6, 5), 1, -2)
    assert reads(node, n=(1, 3))[0].intervals == ((1, 3), (4, 5), (0, 5))


def test_windows() -> None:
    for split in ({"w": 3}, {"n": 2, "w": 2}):
        check_split(aten.unfold.default, image(2, 3, 11), 2, 4, 2, split=split)


def test_numbers_of_a_split_dim() -> None:
    index = torch.tensor([3, 0, 3, 1, 4])
    for split in ({"c": 3}, {"n": 2}, {"n": 2, "c": 2}):
        check_split(aten.index_select.default, image(4, 5, 3), 1, index, split=split)
        check_split(aten.index.Tensor, image(4, 5, 3), [None, index], split=split)


def test_indices_apart_put_their_dims_first() -> None:
    rows, columns = torch.tensor([[0], [2]]), torch.tensor([1, 0, 1])
    for split in ({"n": 2}, {"c": 3}, {"w": 4}, {"n": 2, "w": 2}):
        check_split(aten.index.Tensor, image(3, 4, 2), [rows, None, columns], split=split)


def test_a_mask_is_refused() -> None:
    types = TensorType((4, 3), torch.float32), TensorType((4,), torch.bool)
    roles, attrs = ("self", "indices.0"), {"indices": (None,)}
    node = Node("y", "index", "aten.index.Tensor", ("x", "m"), roles, attrs, types, TensorType((2, 3), torch.float32))
    with pytest.raises(PlanError, match="mask"):
        rule_for(node).signature(node)
