"""Transposed convolution under chosen splits."""

import pytest
import torch

from .fixed_split import check_split, node_for, reads

aten = torch.ops.aten


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_unet_upsampling_reads_no_halo() -> None:
    node, _ = node_for(aten.conv_transpose2d.input, random(1, 2, 8, 8), random(2, 3, 2, 2), None, [2, 2])
    assert reads(node, h=(4, 8))[0].intervals[2] == (2, 4)
    assert reads(node, h=(5, 7))[0].intervals[2] == (2, 4)


@pytest.mark.parametrize("split", [{"h": 2, "w": 2}, {"h": 7}, {"n": 2, "f": 3}])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "more"), [(2, 2, 0, 0), (3, 2, 1, 1), (4, 2, 1, 0), (5, 1, 2, 0)]
)
def test_common_decoders(kernel: int, stride: int, padding: int, more: int, split: dict[str, int]) -> None:
    check_split(
        aten.conv_transpose2d.input, random(2, 2, 5, 6), random(2, 3, kernel, kernel), random(3), [stride] * 2,
        [padding] * 2, [more] * 2, split=split, whole=("weight", "bias"),
    )  # fmt: skip


@pytest.mark.parametrize("parts", [2, 3, 11])
def test_outputs_between_those_of_two_inputs_are_the_bias(parts: int) -> None:
    x, weight, bias = random(1, 2, 4), random(2, 3, 2), random(3)
    check_split(aten.conv_transpose1d.default, x, weight, bias, [5], [0], [4], split={"w": parts},
                whole=("weight", "bias"))  # fmt: skip
    check_split(aten.conv_transpose1d.default, x, weight, None, [5], [1], [3], split={"w": parts}, whole=("weight",))


def test_groups_and_dilation_in_three_dims() -> None:
    check_split(
        aten.conv_transpose3d.input, random(1, 4, 3, 4, 3), random(4, 2, 2, 3, 2), random(4), [1, 2, 3], [1, 0, 2],
        [0, 1, 0], 2, [2, 1, 3], split={"d": 2, "h": 2, "w": 2}, whole=("weight", "bias"),
    )  # fmt: skip
