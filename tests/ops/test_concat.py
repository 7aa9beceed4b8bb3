"""Concatenation under chosen splits."""

import torch

from halocline.ops import rule_for
from halocline.ops.rule import Call

from .fixed_split import check_split, node_for, reads

aten = torch.ops.aten


def image(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_a_part_reads_only_what_falls_into_it() -> None:
    node, _ = node_for(aten.cat.default, [image(1, 2, 4), image(1, 5, 4), image(1, 3, 4)], 1)
    first, second, third = reads(node, c=(1, 6))
    assert (first.intervals[1], second.intervals[1]) == ((1, 2), (0, 4))
    assert third.empty


def test_joined_dim_split_over_more_ranks_than_inputs() -> None:
    tensors = [image(2, size, 3) for size in (1, 4, 2)]
    for parts in (2, 3, 5, 8):
        check_split(aten.cat.default, tensors, 1, split={"c": parts})
    check_split(aten.cat.default, tensors, -2, split={"c": 2, "n": 2})


def test_the_empty_tensor_that_torch_lets_pass() -> None:
    tensors = [torch.zeros(0, dtype=torch.float64), image(3, 2), image(3, 4)]
    check_split(aten.cat.default, tensors, 1, split={"n": 2, "c": 2})


def test_an_input_without_entries_has_an_empty_gradient() -> None:
    check_split(aten.cat.default, [image(2, 3), image(2, 0), image(2, 4)], 1, split={"c": 3})


def test_a_dtype_that_only_one_input_has_counts_on_every_rank() -> None:
    check_split(aten.cat.default, [image(4, 2), torch.arange(4).view(2, 2)], 0, split={"n": 6})


def test_memory_format_is_kept_beside_an_input_that_gives_nothing() -> None:
    x, y = (image(2, 3, 4, 5).to(memory_format=torch.channels_last) for _ in range(2))
    node, _ = node_for(aten.cat.default, [x, y], 1)
    rule, at = rule_for(node), {"n": (0, 2), "c": (0, 2), "h": (0, 4), "w": (0, 5)}
    call = Call(node, at, rule.reads(node, at), rule.writes(node, at), (True, True))
    output, saved = rule.forward(call, [x[:, :2], y[:, :0]])
    assert output.equal(x[:, :2]) and output.is_contiguous(memory_format=torch.channels_last)
    first, second = rule.backward(call, saved, torch.ones_like(output))
    assert first is not None and first.equal(torch.ones_like(output)) and second is None


def test_stack_along_every_dim() -> None:
    tensors = [image(2, 3) for _ in range(4)]
    for dim in (0, 1, 2, -1):
        check_split(aten.stack.default, tensors, dim, split={"n": 2, "w": 3})
    check_split(aten.stack.default, [image() for _ in range(3)], 0, split={"n": 2})
