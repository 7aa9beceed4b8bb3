"""Dropout: the mask is the same in every split, random, and known beforehand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.graph import Graph, Node
from halocline.lowering import lower
from halocline.mesh import Mesh
from halocline.ops.dropout import keep_mask, mask_key
from halocline.ops.rule import Noise
from halocline.placement import Placement, Plan
from halocline.region import Region
from halocline.runtime import Runner

from .fixed_split import node_for

aten = torch.ops.aten
OPS = [aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.feature_alpha_dropout]


def run_split(node: Node, x: Tensor, noise: Noise, split: dict[str, int]) -> tuple[Tensor, Tensor]:
    """The output, put together from all ranks, and the gradient of its sum."""
    graph = Graph((node,), {"x0": node.type}, {}, {}, ("y",), {}, {"x0": node.type, "y": node.type})
    mesh = Mesh(tuple((f"axis_{index}", parts) for index, parts in split.items()))
    plan = Plan(mesh, {"y": {index: (f"axis_{index}",) for index in split}}, {})
    program = lower(Placement(graph, plan), frozenset({"x0"}))
    y, grads = torch.full_like(x, torch.nan), [x] * mesh.size

    def rank(comm: Comm) -> None:
        runner = Runner(program, comm, noise)
        (output,), tape = runner.forward({"x0": x})
        y[tuple(slice(*i) for i in program.placement.layouts["y"].region(comm.rank).intervals)] = output
        grads[comm.rank] = runner.backward(tape, [torch.ones_like(output)])["x0"]

    run_threads(mesh.size, rank)
    return y, grads[0]


@pytest.mark.parametrize("op", OPS)
def test_every_split_drops_the_same(op: Any) -> None:
    x = torch.randn(2, 6, 8, 9, dtype=torch.float64)
    node, _ = node_for(op.default, x, 0.4, True)
    whole = run_split(node, x, Noise(7, 3), {})
    for split in ({"n": 2, "h": 3}, {"w": 9}, {"c": 4, "h": 2}, {"h": 16}):
        torch.testing.assert_close(run_split(node, x, Noise(7, 3), split), whole, rtol=0, atol=0)


def test_the_mask_is_known_beforehand() -> None:
    x = torch.randn(2, 6, 8, 9)
    node, _ = node_for(aten.dropout.default, x, 0.4, True)
    y, grad = run_split(node, x, Noise(7, 3), {"h": 2})
    mask = keep_mask(Region.whole(x.shape), x.shape, 0.4, mask_key(Noise(7, 3), node.name))
    torch.testing.assert_close(y, x * mask / 0.6)
    torch.testing.assert_close(grad, mask / 0.6)


def test_whole_channels_are_dropped() -> None:
    x = torch.ones(16, 32, 4, 5)
    node, _ = node_for(aten.feature_dropout.default, x, 0.5, True)
    y, _ = run_split(node, x, Noise(), {"n": 3, "w": 2})
    assert ((y == 0).all((2, 3)) | (y == 2).all((2, 3))).all()
    assert 0.4 < (y == 0).float().mean() < 0.6


@pytest.mark.parametrize("op", OPS[2:])
def test_alpha_dropout_keeps_mean_and_variance(op: Any) -> None:
    x = torch.randn(512, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    node, _ = node_for(op.default, x, 0.3, True)
    y, grad = run_split(node, x, Noise(1), {"n": 2})
    assert abs(y.mean()) < 0.02 and abs(y.std() - 1) < 0.02
    # Of a kept element, torch gives `a x + b`; of a dropped one, `a (-ALPHA) + b`.
    a, kept = grad.max(), grad != 0
    shift = (y - a * x)[kept].mean()
    torch.testing.assert_close(y[kept], (a * x + shift)[kept])
    torch.testing.assert_close(y[~kept], (-1.7580993408473766 * a + shift).expand(int((~kept).sum())))


def test_steps_seeds_names_and_parts_differ() -> None:
    keys = [mask_key(Noise(seed, step), name) for seed in (0, 1) for step in (0, 1) for name in ("a", "b")]
    region = Region.whole((1, 4, 64, 64))
    masks = [keep_mask(region, region.shape, 0.5, key) for key in keys]
    masks += list(masks[0].split(16, 2))[1:]
    first = masks[0][:, :, :16]
    for other in masks[1:]:
        assert 0.45 < (first == other[:, :, :16]).float().mean() < 0.55


@pytest.mark.parametrize("shape", [(1 << 20,), (4, 16, 128, 128), (1024, 1024), (2, 3, 7, 24_967)])
@pytest.mark.parametrize("p", [0.5, 0.1])
def test_the_mask_is_random(shape: tuple[int, ...], p: float) -> None:
    """The share kept, bytes of eight neighbours, and neighbours along each dim, all within five standard deviations."""
    mask = keep_mask(Region.whole(shape), shape, p, mask_key(Noise(5), "drop"))
    size, spread = mask.numel(), (p * (1 - p)) ** 0.5
    assert abs(mask.double().mean() - (1 - p)) < 5 * spread / size**0.5
    bits = mask.reshape(-1)[: size // 8 * 8].reshape(-1, 8)
    kept = torch.tensor([bin(byte).count("1") for byte in range(256)]).double()
    expected = len(bits) * (1 - p) ** kept * p ** (8 - kept)
    counts = torch.bincount((bits.long() << torch.arange(8)).sum(1), minlength=256)
    common = expected > 5
    chi_square = ((counts - expected) ** 2 / expected)[common].sum()
    freedom = int(common.sum()) - 1
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5
    centred = mask.double() - (1 - p)
    for dim, length in enumerate(shape):
        pairs = centred.narrow(dim, 0, length - 1) * centred.narrow(dim, 1, length - 1)
        assert abs(pairs.sum()) < 5 * spread**2 * max(pairs.numel(), 1) ** 0.5


def test_the_mask_of_a_part_is_the_part_of_the_mask() -> None:
    shape, key = (3, 5, 70, 90), mask_key(Noise(2, 9), "x")
    whole = keep_mask(Region.whole(shape), shape, 0.25, key)
    part = Region(((1, 3), (0, 2), (69, 70), (13, 77)))
    like = torch.empty(part.shape).contiguous(memory_format=torch.channels_last)
    assert torch.equal(keep_mask(part, shape, 0.25, key, like), whole[1:3, 0:2, 69:70, 13:77])
