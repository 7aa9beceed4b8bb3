"""Broadcasts, repeats and fills under chosen splits."""

import copy

import pytest
import torch
from torch import Tensor, nn

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.ops import rule_for
from halocline.ops.rule import Call
from halocline.verify import Report, verify

from .fixed_split import check_split, node_for, reads

aten = torch.ops.aten


def image(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("whole", [(), ("self",)])
def test_gradient_of_a_broadcast_dim_is_summed_over_its_parts(whole: tuple[str, ...]) -> None:
    check_split(aten.expand.default, image(1, 3, 1), [4, 3, 5], split={"n": 2, "w": 2}, whole=whole)


def test_expand_as_reads_nothing_of_the_other() -> None:
    node, _ = node_for(aten.expand_as.default, image(1, 3), image(4, 3))
    assert reads(node, n=(0, 2))[1].empty


@pytest.mark.parametrize("parts", [2, 3, 4, 5, 7])
def test_parts_within_and_across_repetitions(parts: int) -> None:
    check_split(aten.repeat.default, image(2, 3), [1, 5], split={"c": parts})
    check_split(aten.tile.default, image(3), [2, 3], split={"c": parts})


def test_a_part_as_long_as_one_repetition_but_across_two() -> None:
    x = image(4)
    node, _ = node_for(aten.repeat.default, x, [3])
    at = {"n": (2, 6)}
    rule = rule_for(node)
    call = Call(node, at, rule.reads(node, at), rule.writes(node, at), (False,))
    assert rule.run(call, x).equal(x.repeat(3)[2:6])


def test_interleaved_repetitions_follow_the_input() -> None:
    node, _ = node_for(aten.repeat_interleave.self_int, image(4, 5), 3, 1)
    assert rule_for(node).writes(node, {"n": (0, 4), "c": (1, 3)}).intervals == ((0, 4), (3, 9))
    check_split(aten.repeat_interleave.self_int, image(4, 5), 3, split={"n": 3})


def test_one_hot_of_a_part_without_the_highest_class() -> None:
    check_split(aten.one_hot.default, torch.tensor([[0, 1, 0], [4, 0, 1]]), split={"n": 2})


def test_a_copy_carries_the_gradient_to_its_source() -> None:
    x, source = image(4, 3), image(1, 3)
    node, _ = node_for(aten.copy.default, x, source)
    at = {"n": (1, 3), "c": (0, 3)}
    rule = rule_for(node)
    call = Call(node, at, rule.reads(node, at), rule.writes(node, at), (False, True))
    output, saved = rule.forward(call, [x.new_empty(0, 0), source])
    assert output.equal(source.expand(2, 3))
    _, grad = rule.backward(call, saved, torch.ones(2, 3, dtype=torch.float64))
    assert grad is not None and grad.equal(torch.full((1, 3), 2.0, dtype=torch.float64))


class Made(nn.Module):
    """Adds tensors that it makes itself: coordinates, ones, masks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        places = torch.meshgrid(torch.linspace(0, 1, h, dtype=x.dtype), torch.arange(w).to(x), indexing="ij")
        x = torch.cat([x, torch.stack(places).expand(n, -1, -1, -1)], 1)
        x = self.conv(x) + torch.ones(1, 1, h, w, dtype=x.dtype)
        mask = torch.zeros_like(x)
        mask.copy_(x)
        x = x + x.new_full((2, 1, w), 0.5) * mask.clamp(min=0).detach()
        return x.masked_fill(x > 1, 0.25)


@pytest.mark.parametrize("plan", ["sample", "spatial", "n=2,w=2"])
def test_network_with_tensors_of_its_own(plan: str) -> None:
    torch.manual_seed(0)
    whole = Made().double()

    def rank(comm: Comm) -> Report:
        return verify(copy.deepcopy(whole), None, (image(4, 3, 7, 6),), plan, comm=comm)

    for report in run_threads(4, rank):
        assert report.passed, str(report)
