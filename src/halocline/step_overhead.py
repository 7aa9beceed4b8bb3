"""What the runtime spends on a call beside its kernels: the part of a small step that these do not explain."""

import time
from dataclasses import replace
from statistics import median

import torch
from torch import nn

from .capture import capture
from .comm.comm import Comm
from .cost.calibrate import Calibration, Progress, measure_together, silent
from .cost.estimate import estimate
from .cost.local_times import LocalTimes, activation_format
from .gradients import manners
from .step import parallelize

LAYERS = 8
CHANNELS, SIZE = 16, 32
STEPS = 30  # timed after some that warm up


def with_step_overhead(calibration: Calibration, comm: Comm, progress: Progress = silent) -> Calibration:
    """The calibration with `runtime_s`: a chain of small layers, measured and predicted. The same on every rank."""
    progress("small steps", 0, 1)
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(LAYERS)
        for layer in (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU())
    ]
    model, x = nn.Sequential(*layers), torch.randn(1, CHANNELS, SIZE * comm.size, SIZE)
    loss, batch = nn.MSELoss(), (x, torch.zeros_like(x))
    plan = f"h={comm.size}" if comm.size > 1 else "whole"
    step = parallelize(model, loss, batch, plan, comm=comm)
    parts = step.scatter(*batch)
    times = []
    for _ in range(STEPS + 5):
        comm.all_gather_object(None)
        start = time.perf_counter()
        step(*parts).backward()
        times.append(max(float(value) for value in comm.all_gather_object(time.perf_counter() - start)))
    measured_s = median(times[5:])
    graph, _ = capture(model, loss, batch)
    graph = graph.with_attr("batch_norm", "statistics", "global")
    known: dict[str, tuple[float, float]] = {}
    asked = LocalTimes(calibration.machine, activation_format(graph), known)
    estimate(graph, step.plan, calibration.machine, asked)
    for key, call in list(asked.missing.items()):
        known[key] = measure_together(comm, call, asked.format)
    cost = estimate(graph, step.plan, calibration.machine, asked)
    calls = 2 * sum(not manner.absorbed for manner in manners(graph).values())
    runtime_s = max(0.0, (measured_s - cost.seconds + cost.optimizer_s) / calls)
    machine = calibration.machine
    progress("small steps", 1, 1)
    return replace(calibration, machine=replace(machine, local=replace(machine.local, runtime_s=runtime_s)))
