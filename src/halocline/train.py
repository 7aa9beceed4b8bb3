"""The training loop behind `halocline train`, and a twin in one process to compare with."""

import copy
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .capture import capture
from .comm.comm import Comm
from .data.score import average_precision
from .errors import HaloclineError
from .feed import Feed
from .placement import Plan
from .prepared import leaves_of
from .step import PlanSpec, Step, parallelize
from .verify import deviation, draws, whole_values

# Rounding differs, and nets magnify it: a mesh-tangling net at its start some ten thousand times, through batch norms
# of what ReLUs leave. In fp32 its gradient in one process is as far from that in fp64.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.5}


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


def train(step: Step, feed: Feed, recipe: Recipe, steps: int, witness: "Twin | None" = None) -> Iterator[Trained]:
    """Trains `step` on the batches of `feed`, of which each rank makes only what it owns.

    `witness`, on one rank, makes every step too and compares. What is yielded is the same on every rank but for the
    time, in which the witness has no part. Raises HaloclineError when the loss is no longer finite.
    """
    optimizer = recipe.make(step.parameters())
    for number in range(steps):
        parts = feed.part(number, step.regions)
        start_s = time.perf_counter()
        loss = step(*parts)
        loss.backward()
        step_s = time.perf_counter() - start_s
        if witness is not None:
            witness.compare(number, loss, step.model)
        start_s = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        trained = Trained(number, loss.item(), step_s + time.perf_counter() - start_s)
        if not math.isfinite(trained.loss):
            raise HaloclineError(
                f"the loss is {trained.loss} at step {number}: training diverged. "
                f"Use a smaller learning rate than {recipe.lr:g}."
            )
        yield trained


@dataclass(frozen=True)
class Agreement:
    """How far a split net was from its twin: the largest deviations over all steps.

    Of the loss relative to it, of the gradient in the Euclidean norm over all parameters, of each buffer relative to
    its largest magnitude.
    """

    loss: float
    gradients: float
    buffers: float
    steps: int
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype]

    @property
    def passed(self) -> bool:
        return max(self.loss, self.gradients, self.buffers) <= self.tolerance

    def __str__(self) -> str:
        verb = "agrees" if self.passed else "DOES NOT AGREE"
        buffers = f", buffers within {self.buffers:.0e}" if self.buffers else ""
        return (
            f"{verb} with one process at each of {self.steps} steps: loss within {self.loss:.0e}, gradients within "
            f"{self.gradients:.0e}{buffers} ({self.tolerance:.0e} is allowed)"
        )


class Twin:
    """A plain copy of a step's model in this process alone, which makes every step from the same weights.

    It takes over the weights before each step: left alone, two runs that differ by one rounding may part for good
    within ten steps (a deep net of ReLU and then batch norm does), in one process as in many.
    Random ops draw what the split net drew.
    """

    def __init__(self, step: Step, feed: Feed) -> None:
        self.model, self.loss, self.feed, self.noise = (
            copy.deepcopy(step.model),
            copy.deepcopy(step.loss),
            feed,
            step.noise,
        )
        self.graph = step.program.graph
        self.steps, self._loss, self._gradients, self._buffers = 0, 0.0, 0.0, 0.0

    def compare(self, number: int, loss: Tensor, model: nn.Module) -> None:
        """Makes the step of batch `number` from the weights of `model`, whose gradients and buffers it has left."""
        for mine, other in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.data.copy_(other.data)
            mine.grad = None
        own = self._one_process(self.feed.whole(number))
        torch.autograd.backward(own)
        pairs = [(p.grad, mine.grad) for p, mine in zip(model.parameters(), self.model.parameters())]
        self._loss = max(self._loss, deviation(loss, own))
        self._gradients = max(self._gradients, _apart(pairs))
        self._buffers = max(
            self._buffers, *(deviation(b, mine) for b, mine in zip(model.buffers(), self.model.buffers())), 0.0
        )
        self.steps += 1

    def _one_process(self, batch: Sequence[Tensor]) -> Tensor:
        if not any(map(draws, self.graph.nodes)):
            assert self.loss is not None
            return self.loss(self.model(*batch[:-1]), batch[-1])
        leaves = leaves_of(self.graph, self.model, self.loss)
        values = whole_values(self.graph, leaves | dict(zip(self.graph.inputs, batch)), self.noise)
        with torch.no_grad():
            for buffer, value in self.graph.updates.items():
                leaves[buffer].copy_(values[value])
        return values[self.graph.outputs[0]]

    def agreement(self) -> Agreement:
        """How far the two were apart up to now."""
        dtype = next(self.model.parameters()).dtype
        return Agreement(self._loss, self._gradients, self._buffers, self.steps, dtype)


def _apart(pairs: Sequence[tuple[Tensor | None, Tensor | None]]) -> float:
    """The norm of the difference of two gradients over the norm of the second; infinite where only one is there."""
    difference = norm = 0.0
    for got, want in pairs:
        if (got is None) != (want is None):
            return math.inf
        if got is not None and want is not None:
            difference += float((got.double() - want.double()).square().sum())
            norm += float(want.double().square().sum())
    return math.sqrt(difference / max(norm, 1e-300))


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
