"""Group, instance, layer and RMS norm under chosen splits of what they normalise."""

from typing import Any

import pytest
import torch
from torch import Tensor

from .constant_inputs import check_first_gradient, output_of
from .fixed_split import check_split, node_for
from .test_batch_norm import channels, image

aten = torch.ops.aten


@pytest.mark.parametrize("split", [{"h": 4}, {"h": 2, "w": 2}, {"n": 2, "w": 7}, {"n": 2}])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_group_norm(split: dict[str, int], format: torch.memory_format) -> None:
    x = image(2, 8, 5, 6).contiguous(memory_format=format)
    check_split(aten.group_norm.default, x, 4, channels(8, 1), channels(8, 2), split=split)


def test_group_norm_with_more_ranks_than_rows() -> None:
    check_split(aten.group_norm.default, image(1, 4, 1, 6), 2, channels(4, 1), channels(4, 2), split={"h": 3, "w": 2})


@pytest.mark.parametrize(("offset", "dtype"), [(1000, torch.float32), (1000, torch.bfloat16), (0, torch.float32)])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_group_norm_of_a_large_mean(offset: float, dtype: torch.dtype, format: torch.memory_format) -> None:
    """The error against fp64 is at most twice that of one process."""
    x = (image(2, 8, 9, 7) + offset).to(dtype).contiguous(memory_format=format)
    weight, bias = channels(8, 1).float(), channels(8, 2).float()
    node, values = node_for(aten.group_norm.default, x, 4, weight, bias)
    y = output_of(node, values, {"h": 2, "w": 2})
    exact = aten.group_norm.default(x.double(), 4, weight.double(), bias.double())
    plain = aten.group_norm.default(x, 4, weight, bias)
    limit = 2 * (plain.double() - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert (y - exact).abs().max() <= limit


@pytest.mark.parametrize("split", [{"c": 2, "h": 2}, {"n": 2, "w": 4}, {"w": 7}])
def test_instance_norm(split: dict[str, int]) -> None:
    args = (None, None, True, 0.1, 1e-5, True)
    check_split(aten.instance_norm.default, image(2, 3, 5, 6), channels(3, 1), channels(3, 2), *args, split=split)
    check_split(aten.instance_norm.default, image(2, 3, 5, 6), None, None, *args, split=split)


@pytest.mark.parametrize("split", [{"c": 2, "h": 2}, {"n": 2, "w": 4}])
def test_instance_norm_in_evaluation_mode(split: dict[str, int]) -> None:
    args: tuple[Any, ...] = (image(2, 3, 5, 6), *(channels(3, seed) for seed in range(4)), False, 0.1, 1e-5, True)
    check_first_gradient(aten.instance_norm.default, args, split)


@pytest.mark.parametrize("shape", [[6], [5, 6], [3, 5, 6]])
@pytest.mark.parametrize("split", [{"n": 2, "h": 2}, {"w": 4}, {"c": 2, "h": 3}])
def test_layer_norm(shape: list[int], split: dict[str, int]) -> None:
    x, weight, bias = image(2, 3, 5, 6), image(*shape), image(*shape) - 1
    check_split(aten.layer_norm.default, x, shape, weight, bias, split=split)
    check_split(aten.rms_norm.default, x, shape, weight, split=split)


def test_channels_last_layer_norm_as_in_convnext() -> None:
    x = image(2, 8, 5, 6).permute(0, 2, 3, 1)
    check_split(aten.layer_norm.default, x, [8], channels(8, 1), channels(8, 2), split={"c": 2, "h": 3})


def test_normalised_dims_of_size_one_on_many_ranks() -> None:
    """One rank holds them whole and uses torch's kernel; the others hold nothing of them."""
    check_split(aten.layer_norm.default, image(4, 3, 1), [1], split={"w": 2, "c": 2})
    check_split(aten.rms_norm.default, image(4, 3, 1), [1], split={"w": 2, "c": 2})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_default_eps_of_rms_norm(dtype: torch.dtype) -> None:
    x: Tensor = (image(2, 8) * 1e-4).to(dtype)
    node, values = node_for(aten.rms_norm.default, x, [8])
    want = aten.rms_norm.default(x, [8]).double()
    torch.testing.assert_close(output_of(node, values, {"c": 2}), want, rtol=2 * torch.finfo(dtype).eps, atol=0)
