"""Group norm takes every memory order; dims of size one make strides ambiguous, which torch's kernel does not take."""

from itertools import permutations

import pytest
import torch

from .fixed_split import check_split


@pytest.mark.parametrize("shape", [(2, 8, 5, 4), (2, 8, 5, 1), (2, 8, 1, 4), (2, 8, 1, 1), (4, 4, 3, 2)])
def test_group_norm_in_every_memory_order(shape: tuple[int, ...]) -> None:
    weight, bias = torch.randn(2, shape[1], dtype=torch.float64)
    for order in permutations(range(4)):
        x = torch.randn([shape[dim] for dim in order], dtype=torch.float64).permute(
            [order.index(dim) for dim in range(4)]
        )
        assert x.shape == shape
        check_split(torch.ops.aten.group_norm.default, x, 2, weight, bias, split={"n": 2}, whole=("weight", "bias"))
