"""The training loop behind `halocline train`, and a twin in one process to compare with."""

import copy
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .capture import capture
from .comm.comm import Comm
from .data.score import average_precision
from .errors import HaloclineError
from .feed import Feed
from .placement import Plan
from .step import PlanSpec, Step, parallelize
from .verify import RANDOM, deviation

# How far a net may drift from its twin. The order of additions differs, and training magnifies that from step to step.
DRIFT = {torch.float64: 1e-8, torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.5}


@dataclass(frozen=True)
class Recipe:
    """How weights are changed: by `"sgd"` (momentum 0.9) or `"adam"`, at learning rate `lr`."""

    optimizer: str
    lr: float

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, self.lr, momentum=0.9)
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, self.lr)
        raise HaloclineError(f"optimizer {self.optimizer!r} is not known; there are sgd and adam")


@dataclass(frozen=True)
class Trained:
    """One training step that was made: its number, the global loss before it, and the seconds it took."""

    number: int
    loss: float
    step_s: float


def train(step: Step, feed: Feed, recipe: Recipe, steps: int) -> Iterator[Trained]:
    """Trains `step` on the batches of `feed`, of which each rank makes only what it owns.

    What is yielded is the same on every rank but for the time. Raises HaloclineError when the loss is no longer finite.
    """
    optimizer = recipe.make(step.parameters())
    for number in range(steps):
        parts = feed.part(number, step.regions)
        start_s = time.perf_counter()
        loss = step(*parts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained = Trained(number, loss.item(), time.perf_counter() - start_s)
        if not math.isfinite(trained.loss):
            raise HaloclineError(
                f"the loss is {trained.loss} at step {number}: training diverged. "
                f"Use a smaller learning rate than {recipe.lr:g}."
            )
        yield trained


@dataclass(frozen=True)
class Agreement:
    """How far a split net is from its twin after training: largest relative deviations, of losses over all steps.

    Of a parameter or buffer it is the largest difference over the largest magnitude in that tensor.
    """

    loss: float
    parameters: float
    buffers: float
    steps: int
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        return DRIFT.get(self.dtype, 1e-2)

    @property
    def passed(self) -> bool:
        return max(self.loss, self.parameters, self.buffers) <= self.tolerance

    def __str__(self) -> str:
        verb = "agrees" if self.passed else "DOES NOT AGREE"
        buffers = f", buffers within {self.buffers:.0e}" if self.buffers else ""
        return (
            f"{verb} with one process: loss within {self.loss:.0e}, parameters within {self.parameters:.0e}{buffers} "
            f"after {self.steps} steps ({str(self.dtype).removeprefix('torch.')}; allowed {self.tolerance:.0e})"
        )


class Twin:
    """A plain copy of a step's model that is trained in this process alone, on the same batches.

    Raises HaloclineError for a model that draws random numbers: its copy would draw others.
    """

    def __init__(self, step: Step, feed: Feed, recipe: Recipe) -> None:
        for node in step.program.graph.nodes:
            if node.op in RANDOM and node.attrs.get("train", True):
                raise HaloclineError(
                    f"{node.where()} draws at random, so training cannot be compared with one process. "
                    "Use `halocline verify`, which replays what was drawn."
                )
        self.model, self.loss = copy.deepcopy(step.model), copy.deepcopy(step.loss)
        self.feed, self.optimizer, self.losses = feed, recipe.make(self.model.parameters()), list[float]()

    def step(self, number: int) -> None:
        """One training step on the whole batch `number`."""
        assert self.loss is not None
        *inputs, target = self.feed.whole(number)
        loss = self.loss(self.model(*inputs), target)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def agreement(self, model: nn.Module, losses: list[float]) -> Agreement:
        """How far `model`, trained with these losses, is from this twin."""
        loss = max((_relative(a, b) for a, b in zip(losses, self.losses, strict=True)), default=0.0)
        parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        dtype = next(iter(parameters.values())).dtype
        return Agreement(
            loss,
            max((deviation(p, parameters[name]) for name, p in model.named_parameters()), default=0.0),
            max((deviation(b, buffers[name]) for name, b in model.named_buffers()), default=0.0),
            len(losses),
            dtype,
        )


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-30) if a != b else 0.0


class Exam:
    """Held-out batches on which the average precision of a net that gives scores for 0/1 targets is measured."""

    def __init__(self, model: nn.Module, feed: Feed, batches: int, plan: PlanSpec, comm: Comm) -> None:
        self.feed, self.batches, self.comm = feed, batches, comm
        inputs = feed.like()[:-1]
        if isinstance(plan, Plan):
            plan = _without_loss(plan, model, inputs)
        self.step = parallelize(model, plan=plan, comm=comm)
        self.inputs = inputs

    @torch.no_grad()
    def average_precision(self) -> float:
        """Over all points of all held-out targets, in evaluation mode; the same on every rank."""
        training = self.step.training
        self.step.eval()
        self.step.prepare(*self.inputs)
        placement = self.step.program.placement
        (output,) = placement.graph.outputs
        target_region = placement.layouts[output].region(self.comm.rank)
        mine = []
        for number in range(self.batches):
            *parts, target = self.feed.part(number, (*self.step.regions, target_region))
            mine.append((self.step(*parts).flatten(), target.flatten()))
        self.step.train(training)
        # The order of points does not matter, nor that all are there as many times as there are replicas.
        scores, targets = zip(*(pair for pairs in self.comm.all_gather_object(mine) for pair in pairs))
        return average_precision(torch.cat(scores), torch.cat(targets))


def _without_loss(plan: Plan, model: nn.Module, inputs: tuple[Tensor, ...]) -> Plan:
    """A plan that was made for the model with its loss, for the model alone."""
    graph, _ = capture(model, None, inputs)
    nodes = {node.name for node in graph.nodes}
    return Plan(
        plan.mesh,
        {name: split for name, split in plan.splits.items() if name in nodes},
        {name: dims for name, dims in plan.inputs.items() if name in graph.inputs},
        plan.origin,
    )
