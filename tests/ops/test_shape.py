"""Permutations and reshapes: which splits survive."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.ops import rule_for
from halocline.ops.shape import blocks
from halocline.verify import Report, verify

from .fixed_split import check_split, node_for, reads

aten = torch.ops.aten


def image(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def indices(target: object, *args: object) -> dict[str, int]:
    node, _ = node_for(target, *args)
    return dict(rule_for(node).signature(node).indices)


def test_flatten_keeps_samples_and_the_first_merged_dim() -> None:
    assert indices(aten.flatten.using_ints, image(4, 3, 5, 2), 1) == {"n": 4, "c": 3}
    assert indices(aten.view.default, image(4, 3, 5, 2), [4, 3, -1]) == {"n": 4, "c": 3, "h": 5}


def test_dividing_channels_into_groups_splits_over_groups() -> None:
    assert indices(aten.view.default, image(2, 6, 5, 4), [2, 3, 2, 5, 4]) == {"n": 2, "c": 3, "h": 5, "w": 4}
    node, _ = node_for(aten.view.default, image(2, 6, 5, 4), [2, 3, 2, 5, 4])
    assert reads(node, c=(1, 3))[0].intervals[1] == (2, 6)


def test_parts_are_the_largest_steps_that_both_shapes_share() -> None:
    (block,) = blocks((8, 6), (12, 4))  # rows of 6 and rows of 4 meet every 12 entries
    assert (block.size, block.reads, block.writes) == (4, 2, 3)
    assert indices(aten.view.default, image(2, 3), [3, 2]) == {}  # rows of 3 and of 2 meet only at the end


def test_sizes_of_one_come_and_go() -> None:
    assert indices(aten.view.default, image(2, 3, 4), [2, 1, 3, 1, 4]) == {"n": 2, "c": 3, "w": 4}
    assert indices(aten.squeeze.default, image(1, 3, 1, 4)) == {"c": 3, "w": 4}


def test_view_as_reads_nothing_of_the_other() -> None:
    node, _ = node_for(aten.view_as.default, image(4, 6), image(4, 3, 2))
    assert reads(node)[1].empty


def test_view_as_another_dtype_is_not_taken_for_a_reshape() -> None:
    x = image(4, 6).float()
    assert indices(aten.view.dtype, x, torch.int16) == {}
    check_split(aten.view.dtype, x, torch.int16, split={})


@pytest.mark.parametrize("split", [{"n": 3}, {"c": 4}, {"n": 2, "c": 3}])
def test_transposed_split(split: dict[str, int]) -> None:
    check_split(aten.t.default, image(5, 7), split=split)


class Swin(nn.Module):
    """Attention in windows of 4 x 4, shifted by 2."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 3, padding=1)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(0, 2, 3, 1).roll((-2, -2), (1, 2))
        b, h, w, c = x.shape
        tiles = x.view(b, h // 4, 4, w // 4, 4, c).transpose(2, 3).reshape(-1, 16, c)
        q, k, v = self.qkv(tiles).view(-1, 16, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 16, c)
        y = self.out(y).view(b, h // 4, w // 4, 4, 4, c).transpose(2, 3).reshape(b, h, w, c)
        return (x + y).roll((2, 2), (1, 2)).movedim(-1, 1)


class Shuffle(nn.Module):
    """Channel shuffle by hand, local response norm, and a squeeze-and-excitation gate that is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, 2, 1)
        self.norm = nn.LocalResponseNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.a(x))
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
        x = self.norm(x)
        gate = x.flatten(2).mean(2).sigmoid()
        x = self.b(x * gate[:, :, None, None].expand_as(x))
        return torch.stack([x, x.flip(-1)], 1)[:, 1, ::2]


@pytest.mark.parametrize("plan", ["sample", "spatial", "n=2,h=2"])
@pytest.mark.parametrize("model", [Swin, Shuffle])
def test_network_equals_one_process(model: type[nn.Module], plan: str) -> None:
    torch.manual_seed(0)
    whole = model().double()

    def rank(comm: Comm) -> Report:
        return verify(copy.deepcopy(whole), None, (image(4, 3, 16, 12),), plan, comm=comm)

    for report in run_threads(4, rank):
        assert report.passed, str(report)
