"""Element-wise ops: every one of them, and what is special about some."""

import random

import pytest
import torch

from halocline.errors import PlanError
from halocline.graph import Node, TensorType
from halocline.ops import rule_for
from halocline.ops.pointwise import BINARY, UNARY
from halocline.ops.rule import RULES, Call

from .fixed_split import check_split, node_for

aten = torch.ops.aten


def image(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_examples_reach_every_op() -> None:
    torch.manual_seed(0)
    drawn = {str(RULES["abs"].example(random.Random(seed)).target).split(".")[1] for seed in range(3000)}
    assert {op.partition(".")[0] for op in (*UNARY, *BINARY)} - drawn == {"detach_"}


@pytest.mark.parametrize("shape", [(4, 3, 5), (1, 3, 5), (3, 1), (5,), (), (1, 1, 1)])
def test_every_broadcast(shape: tuple[int, ...]) -> None:
    for split in ({"n": 2}, {"c": 3}, {"w": 2, "n": 2}):
        check_split(aten.mul.Tensor, image(4, 3, 5), image(*shape), split=split)
        check_split(aten.where.self, image(*shape) > 0, image(4, 3, 5), image(1, 5), split=split)


def test_an_op_with_nothing_to_do_passes_the_gradient_on() -> None:
    check_split(aten.contiguous.default, image(4, 3), split={"n": 2})
    check_split(aten.to.dtype, image(4, 3), torch.float64, split={"n": 2})


def test_detach_stops_the_gradient() -> None:
    node, _ = node_for(aten.detach.default, image(4))
    rule, at = rule_for(node), {"n": (0, 4)}
    call = Call(node, at, rule.reads(node, at), rule.writes(node, at), (True,))
    _, saved = rule.forward(call, [image(4)])
    assert rule.backward(call, saved, torch.ones(4)) == (None,)


def test_slopes_of_channels_go_with_the_channels() -> None:
    for split in ({"c": 3}, {"n": 2, "h": 2}, {"c": 2, "h": 2}):
        check_split(aten.prelu.default, image(2, 5, 4, 3), image(5), split=split, whole=("weight",))
        check_split(aten.prelu.default, image(2, 5, 4, 3), image(1), split=split, whole=("weight",))


def test_random_slopes_are_refused() -> None:
    type = TensorType((4,), torch.float32)
    node = Node("y", "rrelu", "aten.rrelu.default", ("x",), ("self",), {"training": True}, (type,), type)
    with pytest.raises(PlanError, match="random"):
        rule_for(node).signature(node)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_keeps_its_dtype(dtype: torch.dtype) -> None:
    x = image(4, 3).to(dtype)
    for target, args in ((aten.gelu.default, (x,)), (aten.add.Tensor, (x, 2.5)), (aten.clamp.default, (x, 0, None))):
        node, _ = node_for(target, *args)
        rule, at = rule_for(node), {"n": (1, 3), "c": (0, 3)}
        call = Call(node, at, rule.reads(node, at), rule.writes(node, at), (True,))
        output, _ = rule.forward(call, [x[1:3]])
        assert output.dtype == dtype and output.equal(target(*args)[1:3])


def test_memory_format_is_kept() -> None:
    x = image(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for target in (aten.relu.default, aten.clone.default):
        node, _ = node_for(target, x)
        rule, at = rule_for(node), {"n": (0, 2), "c": (0, 3), "h": (0, 4), "w": (0, 5)}
        call = Call(node, at, rule.reads(node, at), rule.writes(node, at), (False,))
        assert rule.run(call, x).is_contiguous(memory_format=torch.channels_last)
