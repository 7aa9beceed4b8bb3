"""One random net, split at random over ranks that are threads, against the plain module in one process."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ..byhand import plan_by_hand
from ..capture import capture
from ..comm.comm import Comm
from ..comm.threads import run_threads
from ..errors import PlanError
from ..graph import Graph
from ..lowering import Halo, lower
from ..mesh import prime_mesh
from ..ops.resize import is_unambiguous
from ..ops.rule import Noise
from ..placement import Placement
from ..prepared import leaves_of
from ..program import Program
from ..recompute import with_recomputation
from ..region import Region
from ..runtime import Runner
from ..verify import deviation, draws, whole_values
from .layers import Shape
from .net import RandomNet, Recipe, draw_recipe, shape_after

TOLERANCE = 1e-9
AMPLIFIES = 1e3  # nets that make a rounding error larger than this are left out: one process is no better
NOISE = Noise(3, 1)


@dataclass(frozen=True)
class Case:
    """A net, the plan by which it is split, and how it is run."""

    recipe: Recipe
    ranks: int
    plan: str | Mapping[str, str]
    halo: Halo = "auto"
    channels_last: bool = False
    train: bool = True
    seed: int = 0
    division: Literal["balanced", "chunk"] = "balanced"
    segments: int = 0  # into so many segments of nodes the net is cut, all of which are recomputed


class Unusable(Exception):
    """The case says nothing: one process cannot run it either, or it cannot be split so."""


def draw_case(seed: int, number: int, ranks: int = 8) -> Case:
    """The case `number` of a seed, on up to `ranks` ranks."""
    rng = random.Random(f"{seed} {number}")
    recipe = draw_recipe(rng)
    count = rng.randint(min(2, ranks), ranks)
    return Case(recipe, count, _draw_plan(rng, recipe, count), rng.choice(("extend", "correct", "auto")),
                rng.random() < 0.25, rng.random() < 0.8, number, rng.choice(("balanced", "balanced", "chunk")),
                rng.choice((0, 0, 0, 1, 3, 8)))  # fmt: skip


def _draw_plan(rng: random.Random, recipe: Recipe, ranks: int) -> str | dict[str, str]:
    if rng.random() < 0.7:
        return _draw_phrase(rng, recipe.shape, ranks, "nndhhww")
    shapes, skips = [recipe.shape], [recipe.shape]
    for layer in recipe.layers:
        shapes.append(shape_after(layer, shapes[-1], skips))
    positions = [i for i, layer in enumerate(recipe.layers) if layer.kind not in ("save", "dropout")]
    plan = {}
    for i in sorted(rng.sample(positions, k=rng.randint(min(1, len(positions)), len(positions)))):
        indices = "nndhhwwf" if recipe.layers[i].kind in ("conv", "transposed") else "nndhhwwc"
        plan[f"layers.{i}"] = _draw_phrase(rng, shapes[i + 1], ranks, indices)
    return plan


def _draw_phrase(rng: random.Random, shape: Shape, ranks: int, indices: str) -> str:
    """A split that leaves no part of `shape` empty, if there is one; now and then one that does."""
    names = {1: "ncw", 2: "nchw", 3: "ncdhw"}[len(shape) - 2]
    sizes = dict(zip(names, shape)) | {"f": shape[1]}
    counts: dict[str, int] = {}
    for _, size in prime_mesh(ranks).axes:
        fits = [index for index in indices if sizes.get(index, 0) >= size * counts.get(index, 1)]
        index = rng.choice(fits or [index for index in indices if index in sizes])
        counts[index] = counts.get(index, 1) * size
    return ",".join(f"{index}={count}" for index, count in counts.items())


class _Loss(nn.Module):
    """The mean of the product with random numbers: the gradient is another one at every place."""

    def forward(self, output: Tensor, weights: Tensor) -> Tensor:
        return (output * weights).mean()


def check(case: Case) -> str | None:
    """What is wrong with the split net, or None. Raises Unusable for a case that says nothing."""
    torch.manual_seed(case.seed)
    try:
        model = RandomNet(case.recipe).double().train(case.train)
        x = torch.randn(case.recipe.shape, dtype=torch.float64)
        with torch.no_grad():
            output = RandomNet(case.recipe).double().train(case.train)(x)
        batch = (x, torch.randn_like(output))
        if not _well_conditioned(model, batch):
            raise Unusable("rounding errors grow in one process too")
    except (RuntimeError, ValueError, IndexError, NotImplementedError, AssertionError) as error:
        raise Unusable(f"one process: {error}") from error
    try:
        graph, _ = capture(model, _Loss(), batch)
        if not all(is_unambiguous(node) for node in graph.nodes if "upsample_nearest" in node.op):
            raise Unusable("one process: torch's gradient of a resized map is not that of its forward pass")
        plan = plan_by_hand(graph, prime_mesh(case.ranks), case.plan)
        if case.channels_last:
            plan = replace(plan, memory_format="channels_last")
        wanted = frozenset(graph.parameters) | {next(iter(graph.inputs))}
        plan = replace(plan, division=case.division)
        if case.segments:
            plan = replace(plan, recompute=_cut([node.name for node in graph.nodes], case.segments))
        program = with_recomputation(lower(Placement(graph, plan), wanted, case.halo))
    except PlanError as error:
        raise Unusable(f"the plan: {error}") from error
    except Unusable:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    want = _one_process(graph, model, batch)
    try:
        problems = run_threads(case.ranks, lambda comm: _compare(program, model, batch, want, comm), timeout_s=120.0)
    except Exception as error:
        return " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return next((problem for problem in problems if problem), None)


def _cut(names: list[str], parts: int) -> tuple[tuple[str, ...], ...]:
    size = -(-len(names) // parts)
    return tuple(tuple(names[i : i + size]) for i in range(0, len(names), size))


def _values(graph: Graph, model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Copies of all leaves and of the batch, by their names in the graph."""
    leaves = leaves_of(graph, model, _Loss()) | dict(zip(graph.inputs, batch))
    return {name: value.detach().clone() for name, value in leaves.items()}


def _one_process(graph: Graph, model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The loss, the gradient of every leaf and every buffer afterwards, from plain torch on whole tensors."""
    values = _values(graph, model, batch)
    leaves = {name: values[name].requires_grad_() for name in (*graph.parameters, next(iter(graph.inputs)))}
    if any(map(draws, graph.nodes)):  # masks are those of the split net
        found = whole_values(graph, values, NOISE)
        loss, buffers = found[graph.outputs[0]], {name: found[value] for name, value in graph.updates.items()}
    else:
        paths = {**graph.parameters, **graph.buffers}
        changed = {path: values[name] for name, path in paths.items()}
        loss = _Loss()(torch.func.functional_call(model, changed, (values[next(iter(graph.inputs))],)), batch[1])
        buffers = {}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    state = {name: values[name] for name in graph.buffers} | buffers
    want = {"loss": loss.detach()} | {f"buffer {name}": value.detach() for name, value in state.items()}
    return want | {
        f"gradient {name}": torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads)
    }


def _well_conditioned(model: nn.Module, batch: tuple[Tensor, ...]) -> bool:
    """Whether one process gives nearly the same for nearly the same input."""
    found = []
    for scale in (0.0, 1e-13):
        torch.manual_seed(0)  # dropout draws the same twice
        x = (batch[0] * (1 + scale * torch.randn_like(batch[0]))).requires_grad_()
        torch.manual_seed(1)
        state = {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
        loss = (torch.func.functional_call(model, state, (x,)) * batch[1]).mean()
        wanted = [x, *(state[name] for name, _ in model.named_parameters())]
        found.append([loss, *torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)])
    if not all(torch.isfinite(value).all() for value in found[0]):
        raise Unusable("one process: not a number")
    largest = max(float(grad.abs().max()) for grad in found[0][1:] if grad.numel())
    apart = [deviation(a, b, 1e-3 * largest) for a, b in zip(found[1][1:], found[0][1:])]
    return max(apart) < 1e-13 * AMPLIFIES


def _compare(
    program: Program, model: nn.Module, batch: tuple[Tensor, ...], want: Mapping[str, Tensor], comm: Comm
) -> str | None:
    """The first thing that is wrong on this rank."""
    graph, layouts = program.graph, program.placement.layouts

    def mine(name: str, whole: Tensor) -> Tensor:
        return whole[layouts[name].region(comm.rank).within(Region.whole(whole.shape))].clone()

    values = {name: mine(name, value) for name, value in _values(graph, model, batch).items()}
    runner = Runner(program, comm, NOISE)
    outputs, tape = runner.forward(values)
    grads = runner.backward(tape, [torch.ones((), dtype=torch.float64)])
    largest = max(float(value.abs().max()) for name, value in want.items() if name.startswith("gradient"))
    found = {"loss": outputs[0]} | {f"buffer {name}": values[name] for name in graph.buffers}
    found |= {f"gradient {name}": grads[name] for name in graph.parameters if name in grads}
    for what, whole in want.items():
        kind, _, name = what.partition(" ")
        expected = mine(name, whole) if name in graph.inputs else whole
        got = grads.get(name) if name in graph.inputs else found.get(what)
        got = torch.zeros_like(expected) if got is None else got
        if got.shape != expected.shape:
            return f"{what} on rank {comm.rank}: shape {tuple(got.shape)}, not {tuple(expected.shape)}"
        # A running mean is measured against a standard deviation, of which it is a small part.
        share = 1e-3 * largest if largest > 1e-12 else 1.0  # all gradients are zero but for rounding
        floor = share if kind == "gradient" else 0.1 if kind == "loss" else float("mean" in name)
        if expected.numel() and (worst := deviation(got, expected, floor)) > TOLERANCE:
            return f"{what} on rank {comm.rank}: differs by {worst:.1e} of the largest"
    return None
