"""Batch norm: the three kinds of statistics, evaluation mode, and running statistics."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.errors import PlanError
from halocline.graph import Graph
from halocline.lowering import lower
from halocline.mesh import Mesh
from halocline.ops import rule_for
from halocline.ops.channels import Standard, standardised, through_statistics
from halocline.ops.rule import Noise
from halocline.placement import Placement, Plan
from halocline.runtime import Runner

from .fixed_split import node_for

batch_norm = torch.ops.aten.batch_norm.default
BUFFERS = ("running_mean", "running_var")


def image(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 + 5


def channels(count: int, seed: int) -> Tensor:
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.5


def run_split(args: tuple[Any, ...], split: dict[str, int], statistics: str = "global") -> dict[str, Tensor]:
    """Output, gradients (of `output.square().sum() / 2`) and buffers of ranks that agree on all they hold twice."""
    node, values = node_for(batch_norm, *args[:3], *(None if v is None else v.clone() for v in args[3:5]), *args[5:])
    node = replace(node, attrs={**node.attrs, "statistics": statistics})
    values = {name: value for name, value in zip(node.inputs, (a for a in args if isinstance(a, Tensor)))}
    names = dict(zip(node.roles, node.inputs))
    types = dict(zip(node.inputs, node.input_types))
    buffers = [names[role] for role in BUFFERS if role in names]
    leaves = {name: name for role, name in names.items() if role in ("weight", "bias")}
    inputs = {names["input"]: types[names["input"]]}
    held = {name: name for name in buffers}
    graph = Graph((node,), inputs, leaves, held, ("y",), {}, {"y": node.type, **types})
    mesh = Mesh(tuple((f"axis_{index}", parts) for index, parts in split.items()))
    plan = Plan(mesh, {"y": {index: (f"axis_{index}",) for index in split}}, {})
    placement = Placement(graph, plan)
    program = lower(placement, frozenset({names["input"], *leaves}))
    y, grad_x = torch.full(node.type.shape, torch.nan).double(), torch.full(node.type.shape, torch.nan).double()
    found: list[dict[str, Tensor]] = [{} for _ in range(mesh.size)]

    def rank(comm: Comm) -> None:
        torch.set_num_threads(1)
        mine = {name: value.clone() for name, value in values.items()}
        runner = Runner(program, comm, Noise())
        (output,), tape = runner.forward(mine)
        grads = runner.backward(tape, [output])
        box = tuple(slice(*interval) for interval in placement.layouts["y"].region(comm.rank).intervals)
        y[box] = output
        grad_x[...] = grads[names["input"]]  # whole on every rank: the input is not split
        by_role = {role: grads[name] for role, name in names.items() if name in leaves}
        found[comm.rank] = {**by_role, **{role: mine[names[role]] for role in BUFFERS if role in names}}

    run_threads(mesh.size, rank)
    for other in found:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=0)
    return {"y": y, "input": grad_x, **found[0]}


def one_process(args: tuple[Any, ...]) -> dict[str, Tensor]:
    x, weight, bias, mean, variance, *rest = (a.clone() if isinstance(a, Tensor) else a for a in args)
    leaves = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    y = batch_norm(*leaves, mean, variance, *rest)
    y.square().sum().div(2).backward()
    grads = dict(zip(("input", "weight", "bias"), (leaf.grad for leaf in leaves)))
    return {"y": y.detach(), **grads, "running_mean": mean, "running_var": variance}


def arguments(shape: tuple[int, ...], training: bool, momentum: float = 0.1) -> tuple[Any, ...]:
    return (image(*shape), *(channels(shape[1], seed) for seed in range(4)), training, momentum, 1e-5, True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("split", [{"n": 2, "h": 3}, {"w": 5}, {"h": 4, "w": 2}])
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0])
def test_global_statistics_are_those_of_one_process(training: bool, split: dict[str, int], momentum: float) -> None:
    args = arguments((2, 3, 7, 5), training, momentum)
    torch.testing.assert_close(run_split(args, split), one_process(args), rtol=1e-9, atol=1e-11)


def test_evaluation_mode_splits_channels_and_communicates_nothing() -> None:
    args = arguments((2, 3, 4, 5), training=False)
    torch.testing.assert_close(run_split(args, {"c": 2, "h": 2}), one_process(args), rtol=1e-9, atol=1e-11)
    node, _ = node_for(batch_norm, *args)
    rule: Any = rule_for(node)
    assert rule.reductions(node) == rule.grad_reductions(node) == ()


def test_channels_are_not_split_where_running_statistics_are_updated() -> None:
    node, _ = node_for(batch_norm, *arguments((2, 3, 4, 5), training=True))
    assert "c" not in rule_for(node).signature(node).indices


@pytest.mark.parametrize(("statistics", "split"), [("spatial", {"n": 3, "h": 2}), ("local", {"n": 3, "h": 2})])
def test_statistics_of_groups(statistics: str, split: dict[str, int]) -> None:
    """Each group gives what one process gives for the group alone; the running statistics take the groups' mean."""
    args = arguments((6, 3, 4, 5), training=True)
    x = args[0]
    samples = x.split(2)
    groups = samples if statistics == "spatial" else [part for group in samples for part in group.split(2, 2)]
    alone = [one_process((group, *args[1:])) for group in groups]
    want = {key: torch.stack([found[key] for found in alone]).sum(0) for key in ("weight", "bias")}
    want |= {key: torch.stack([found[key] for found in alone]).mean(0) for key in BUFFERS}
    for key in ("y", "input"):
        pieces = [found[key] for found in alone]
        if statistics == "local":
            pieces = [torch.cat(pieces[i : i + 2], 2) for i in range(0, 6, 2)]
        want[key] = torch.cat(pieces)
    torch.testing.assert_close(run_split(args, split, statistics), want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("statistics", ["spatial", "local"])
def test_groups_without_elements_weigh_nothing(statistics: str) -> None:
    found = run_split(arguments((2, 3, 2, 2), training=True), {"n": 3, "h": 3}, statistics)
    assert all(value.isfinite().all() for value in found.values())


def test_unknown_statistics_are_refused() -> None:
    node, _ = node_for(batch_norm, *arguments((2, 3, 4, 5), training=True))
    with pytest.raises(PlanError, match="statistics 'sample' are not known"):
        rule_for(node).signature(replace(node, attrs={**node.attrs, "statistics": "sample"}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("narrow_weights", [False, True])
def test_half_precision_and_memory_formats(
    dtype: torch.dtype, format: torch.memory_format, narrow_weights: bool
) -> None:
    """In half precision the error against fp64 is at most twice that of one process."""
    wide = arguments((2, 4, 8, 8), training=True)
    x = wide[0].to(dtype).contiguous(memory_format=format)
    weights = [v.to(dtype if narrow_weights else torch.float32) for v in wide[1:5]]
    exact = one_process((x.double(), *(v.double() for v in weights), *wide[5:]))
    args = (x, *weights, *wide[5:])
    found, plain = run_split(args, {"h": 2}), one_process(args)
    for key, value in exact.items():
        limit = 2 * (plain[key].double() - value).abs().max() + torch.finfo(dtype).eps * value.abs().max()
        assert (found[key].double() - value).abs().max() <= limit, key


def test_channels_last_is_kept() -> None:
    x = image(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    mean, variance, weight, bias = (channels(3, seed) for seed in range(4))
    standard = Standard(mean, variance, 1e-5)
    y = standardised(x, standard, weight, bias)
    grad_x = through_statistics(y.contiguous(), x, standard, weight, bias, mean)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert grad_x.is_contiguous(memory_format=torch.channels_last)
