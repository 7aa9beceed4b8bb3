"""What the runtime spends beside kernels and messages: the part of a small step that these do not explain."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import torch
from torch import nn

from .capture import capture
from .comm.comm import Comm
from .cost.calibrate import Calibration, Progress, measure_together, silent
from .cost.estimate import estimate
from .cost.local_times import LocalTimes, activation_format
from .cost.machine import Machine, Roofline
from .gradients import manners
from .program import Program, Reduce, Start, StartAdjoint
from .step import Step, parallelize

LAYERS = 8
CHANNELS, SIZE = 16, 32
STEPS = 30  # timed after some that warm up


@dataclass(frozen=True)
class _Chain:
    """A chain of small layers under a plan; what its step takes beyond what is known already is `figure`'s."""

    figure: Literal["runtime_s", "reduce_s", "fetch_s"]
    plan: str
    statistics: Literal["local", "global"]
    samples: int
    height: int

    def occasions(self, program: Program) -> int:
        """How often a step spends the figure."""
        if self.figure == "runtime_s":
            return 2 * sum(not manner.absorbed for manner in manners(program.graph).values())
        steps = (*program.forward, *program.backward)
        if self.figure == "reduce_s":
            return sum(isinstance(step, Reduce) and bool(step.axes) for step in steps)
        return sum(isinstance(step, Start | StartAdjoint) for step in steps)


def _chains(ranks: int) -> Sequence[_Chain]:
    """Each of these spends one thing more than the one before."""
    if ranks == 1:
        return [_Chain("runtime_s", "whole", "global", 1, SIZE)]
    return [
        _Chain("runtime_s", f"n={ranks}", "local", ranks, SIZE),
        _Chain("reduce_s", f"n={ranks}", "global", ranks, SIZE),
        _Chain("fetch_s", f"h={ranks}", "global", 1, SIZE * ranks),
    ]


def with_step_overhead(calibration: Calibration, comm: Comm, progress: Progress = silent) -> Calibration:
    """The calibration with `runtime_s`, `reduce_s` and `fetch_s` of the `Roofline`. The same on every rank."""
    machine, chains = calibration.machine, _chains(comm.size)
    known: dict[str, tuple[float, float]] = {}
    for number, chain in enumerate(chains):
        progress("small steps", number, len(chains))
        seconds = _unexplained(chain, machine, comm, known)
        local: Roofline = replace(machine.local, **{str(chain.figure): seconds})  # type: ignore[arg-type]
        machine = replace(machine, local=local)
    progress("done", len(chains), len(chains))
    return replace(calibration, machine=machine)


def _unexplained(chain: _Chain, machine: Machine, comm: Comm, known: dict[str, tuple[float, float]]) -> float:
    """By how much a step takes longer than `machine` says, for each of the chain's occasions; at least 0."""
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(LAYERS)
        for layer in (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU())
    ]
    model, loss = nn.Sequential(*layers), nn.MSELoss()
    x = torch.randn(chain.samples, CHANNELS, chain.height, SIZE)
    batch = x, torch.zeros_like(x)
    step = parallelize(model, loss, batch, chain.plan, statistics=chain.statistics, comm=comm)
    measured_s = _measured_s(step, step.scatter(*batch), comm)
    graph = capture(model, loss, batch)[0].with_attr("batch_norm", "statistics", chain.statistics)
    asked = LocalTimes(machine, activation_format(graph), known)
    estimate(graph, step.plan, machine, asked)
    for key, call in list(asked.missing.items()):
        known[key] = measure_together(comm, call, asked.format)
    cost = estimate(graph, step.plan, machine, asked)
    return max(0.0, (measured_s - cost.seconds + cost.optimizer_s) / chain.occasions(step.program))


def _measured_s(step: Step, parts: Sequence[torch.Tensor], comm: Comm) -> float:
    """The seconds of a forward and backward pass on the slowest rank."""
    times = []
    for _ in range(STEPS + 5):
        comm.all_gather_object(None)
        start = time.perf_counter()
        step(*parts).backward()
        times.append(max(float(value) for value in comm.all_gather_object(time.perf_counter() - start)))
    return median(times[5:])
