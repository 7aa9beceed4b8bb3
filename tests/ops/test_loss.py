"""Losses under chosen splits: what a mean divides by, and precision."""

from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.graph import Graph, TensorType
from halocline.mesh import Mesh
from halocline.ops.rule import Noise
from halocline.placement import Placement, Plan
from halocline.program import lower
from halocline.runtime import Runner

from .fixed_split import check_split, node_for

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def image(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def classes(*shape: int, of: int) -> Tensor:
    return torch.randint(0, of, shape, generator=torch.Generator().manual_seed(1))


def check_weighted(target: Any, args: tuple[Any, ...], split: dict[str, int]) -> None:
    """Output and gradient of the first argument; class weights, to which torch gives no gradient, are replicated."""
    node, values = node_for(target, *args)
    types = {name: TensorType(tuple(value.shape), value.dtype) for name, value in values.items()}
    first, second, *weights = node.inputs
    inputs = {name: types[name] for name in (first, second)}
    graph = Graph((node,), inputs, {}, {name: name for name in weights}, ("y",), {}, {"y": node.type, **types})
    mesh = Mesh(tuple((f"axis_{index}", parts) for index, parts in split.items()))
    plan = Plan(mesh, {"y": {index: (f"axis_{index}",) for index in split}}, {})
    program = lower(Placement(graph, plan), frozenset({first}))
    x = args[0].clone().requires_grad_()
    want = target(x, *args[1:])
    cotangent = torch.rand_like(want)
    want.backward(cotangent)

    def rank(comm: Comm) -> None:
        torch.set_num_threads(1)
        runner = Runner(program, comm, Noise())
        (output,), tape = runner.forward(values)
        region = program.placement.layouts["y"].region(comm.rank).intervals
        mine = tuple(slice(*interval) for interval in region)
        torch.testing.assert_close(output, want.detach()[mine], rtol=1e-9, atol=1e-11, equal_nan=True)
        grads = runner.backward(tape, [cotangent[mine]])
        torch.testing.assert_close(grads[first], x.grad, rtol=1e-9, atol=1e-11, equal_nan=True)

    run_threads(mesh.size, rank)


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("split", [{"n": 2, "h": 3}, {"w": 6}, {"n": 5}])
def test_class_weights_and_ignored_classes(reduction: int, smoothing: float, split: dict[str, int]) -> None:
    target = classes(2, 4, 5, of=3)
    weight = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    args = (image(2, 3, 4, 5), target, weight, reduction, 1, smoothing)
    check_weighted(aten.cross_entropy_loss.default, args, split)
    check_weighted(aten.nll_loss_nd.default, args[:5], split)


def test_a_rank_whose_targets_are_all_ignored() -> None:
    target = classes(4, 6, of=3)
    target[:2] = -100
    check_split(aten.cross_entropy_loss.default, image(4, 3, 6), target, split={"n": 2})


def test_the_mean_over_no_target_is_not_a_number() -> None:
    target = torch.full((4, 6), -100)
    check_split(aten.cross_entropy_loss.default, image(4, 3, 6), target, split={"n": 2})
    check_split(aten.nll_loss_nd.default, image(4, 3, 6), target, None, SUM, split={"n": 2})


def test_one_sample_without_a_batch_dim() -> None:
    check_split(aten.cross_entropy_loss.default, image(5), torch.tensor(3), split={})


@pytest.mark.parametrize("reduction", [MEAN, SUM])
@pytest.mark.parametrize("op", [aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss])
def test_more_ranks_than_elements(op: Any, reduction: int) -> None:
    check_split(op.default, image(1, 1, 3), image(1, 1, 3) - 1, reduction, split={"w": 4, "n": 2})


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_weights_that_broadcast(reduction: int) -> None:
    x, target = image(2, 3, 4, 5), image(2, 3, 4, 5).sigmoid()
    weight, positive = torch.rand(4, 1, dtype=torch.float64), torch.rand(3, 1, 1, dtype=torch.float64)
    args = (x, target, weight, positive, reduction)
    for split in ({"h": 3, "c": 2}, {"n": 2, "w": 3}):
        check_weighted(aten.binary_cross_entropy_with_logits.default, args, split)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float(dtype: torch.dtype) -> None:
    x = torch.full((64, 64), 3.0, dtype=dtype)
    x[0, 0] = 30
    check_split(aten.mse_loss.default, x, torch.full_like(x, 2.0), split={"n": 4})
