"""Drawn numbers: the same in every split, new in every step, of the right distribution, and within their bounds."""

from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.graph import Node, TensorType
from halocline.ops import rule_for
from halocline.ops.call_op import bound, node_of
from halocline.ops.rule import Call, Noise
from halocline.region import Region

aten = torch.ops.aten
SHAPE = (4, 6, 31, 50)
X = torch.full(SHAPE, 0.3, dtype=torch.float64)
CALLS: dict[str, tuple[Any, tuple[Any, ...], float, float]] = {  # with mean and standard deviation
    "rand": (aten.rand.default, (SHAPE,), 0.5, 12**-0.5),
    "rand_like": (aten.rand_like.default, (X,), 0.5, 12**-0.5),
    "randn": (aten.randn.default, (SHAPE,), 0, 1),
    "randn_like": (aten.randn_like.default, (X,), 0, 1),
    "bernoulli": (aten.bernoulli.default, (X,), 0.3, 0.21**0.5),
    "bernoulli.p": (aten.bernoulli.p, (X, 0.8), 0.8, 0.16**0.5),
    "uniform": (aten.uniform.default, (X, -1.0, 3.0), 1, 4 * 12**-0.5),
    "exponential": (aten.exponential.default, (X, 2.0), 0.5, 0.5),
    "normal": (aten.normal.Tensor_Tensor, (X, 2 * X), 0.3, 0.6),
    "normal_functional": (aten.normal_functional.default, (X, 1.0, 0.5), 1, 0.5),
    "randint": (aten.randint.low, (-2, 3, SHAPE), 0, 2**0.5),
}


def node_for(target: Any, args: tuple[Any, ...], dtype: torch.dtype = torch.float64) -> tuple[Node, list[Tensor]]:
    tensors: list[Tensor] = []

    def value_of(argument: Any) -> tuple[str, TensorType] | None:
        if not isinstance(argument, Tensor):
            return None
        tensors.append(argument)
        return f"x{len(tensors)}", TensorType(tuple(argument.shape), argument.dtype)

    return node_of(target, bound(target, args, {}), value_of, "y", TensorType(SHAPE, dtype)), tensors


def draw(node: Node, tensors: list[Tensor], region: Region, noise: Noise) -> Tensor:
    at = dict(zip("nchw", region.intervals))
    rule = rule_for(node)
    reads = rule.reads(node, at)
    assert rule.writes(node, at) == region
    inputs = [x[read.within(Region.whole(x.shape))] for x, read in zip(tensors, reads)]
    output, saved = rule.forward(Call(node, at, reads, region, (True,) * len(inputs), noise), inputs)
    if inputs:
        call = Call(node, at, reads, region, (True,) * len(inputs), noise)
        assert all(grad is None for grad in rule.backward(call, saved, torch.ones_like(output)))
    return output


@pytest.mark.parametrize("name", CALLS)
def test_parts_are_those_of_the_whole(name: str) -> None:
    target, args, mean, deviation = CALLS[name]
    node, tensors = node_for(target, args)
    whole = draw(node, tensors, Region.whole(SHAPE), Noise(5, 2))
    for region in (Region(((1, 3), (0, 6), (7, 20), (49, 50))), Region(((3, 4), (2, 5), (0, 31), (0, 17)))):
        part = draw(node, tensors, region, Noise(5, 2))
        torch.testing.assert_close(part, whole[region.within(Region.whole(SHAPE))], rtol=0, atol=0)
    assert not torch.equal(draw(node, tensors, Region.whole(SHAPE), Noise(5, 3)), whole)
    assert not torch.equal(draw(node, tensors, Region.whole(SHAPE), Noise(6, 2)), whole)
    sampling_error = deviation / whole.numel() ** 0.5
    assert abs(whole.mean() - mean) < 4 * sampling_error
    assert abs(whole.std() / deviation - 1) < 0.02
    assert abs((whole - mean)[..., 1:].mul((whole - mean)[..., :-1]).mean()) < 5 * deviation * sampling_error


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_stay_below_one(dtype: torch.dtype) -> None:
    node, _ = node_for(aten.rand.default, (SHAPE,), dtype)
    drawn = draw(node, [], Region.whole(SHAPE), Noise())
    assert drawn.dtype == dtype and drawn.min() >= 0 and drawn.max() < 1
    assert drawn.unique().numel() > (200 if dtype == torch.bfloat16 else 1500)
