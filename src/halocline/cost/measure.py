"""Measures what a `Machine` is made of: links, sums, and local computations, over the ranks that run."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..comm.comm import Comm
from ..exchange import channels_last
from ..graph import TensorType
from ..ops import rule_for
from ..ops.rule import Call, Rule, StagedRule
from ..region import Region
from .local_times import LocalCall

MESSAGE_BYTES = (8, 1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22)
CACHE_BYTES = 48 << 20  # written between two timings, so that a call finds its saved tensors in memory, as in a step


@dataclass(frozen=True)
class Fit:
    """A line `fixed_s + n * per_byte_s` through times by bytes; `residual` is the median relative deviation."""

    fixed_s: float
    per_byte_s: float
    residual: float
    points: tuple[tuple[int, float], ...]


def fit_line(points: Iterable[tuple[int, float]]) -> Fit:
    """The line that is nearest to the points relative to their times."""
    found = tuple(points)
    n, t = np.array([size for size, _ in found], dtype=float), np.array([seconds for _, seconds in found])
    rows = np.stack([1 / t, n / t], axis=1)
    solution = np.linalg.lstsq(rows, np.ones(len(t)), rcond=None)[0]
    fixed, slope = max(float(solution[0]), float(t.min()) * 0.1), max(float(solution[1]), 1e-13)
    residual = float(np.median(np.abs(fixed + n * slope - t) / t))
    return Fit(fixed, slope, residual, found)


def measure_messages(comm: Comm) -> Fit:
    """The time of an exchange between neighbours, both directions at once, over the sizes `MESSAGE_BYTES`."""
    peer = comm.rank ^ 1
    points = []
    for nbytes in MESSAGE_BYTES:
        out, into = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)

        def swap(out: Tensor = out, into: Tensor = into) -> None:
            if peer < comm.size:
                comm.exchange([(peer, out)], [(peer, into)]).wait()

        points.append((nbytes, slowest(comm, _timed(swap, 30 if nbytes < 1 << 18 else 8, comm))))
    return fit_line(points)


def measure_sums(comm: Comm) -> tuple[tuple[int, float], ...]:
    """The time of an allreduce over all ranks, by bytes."""
    group = tuple(range(comm.size))
    points = []
    for nbytes in MESSAGE_BYTES[1:]:
        values = torch.zeros(nbytes // 4)

        def add(values: Tensor = values) -> None:
            comm.all_reduce(values, group).wait()

        points.append((nbytes, slowest(comm, _timed(add, 20 if nbytes < 1 << 18 else 8, comm))))
    return tuple(points)


def measure_overlap(comm: Comm) -> float:
    """Which share of an allreduce of 4 MiB is hidden by a computation that takes as long."""
    group, values = tuple(range(comm.size)), torch.zeros(1 << 20)
    a = torch.randn(256, 256)
    alone = slowest(comm, _timed(lambda: comm.all_reduce(values, group).wait(), 8, comm))
    once = max(_timed(lambda: torch.mm(a, a), 20, comm), 1e-6)
    count = max(1, round(alone / once))

    def computing() -> None:
        for _ in range(count):
            torch.mm(a, a)

    def both() -> None:
        handle = comm.all_reduce(values, group)
        computing()
        handle.wait()

    compute, together = (slowest(comm, _timed(work, 8, comm)) for work in (computing, both))
    return min(1.0, max(0.0, 1.0 - (together - compute) / alone))


def slowest(comm: Comm, seconds: float) -> float:
    """The largest of all ranks' values."""
    return max(float(value) for value in comm.all_gather_object(seconds))


def _timed(work: Callable[[], object], repeats: int, comm: Comm) -> float:
    work()
    comm.all_gather_object(None)
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return median(found)


def measure_call(call: LocalCall, format: str, least_s: float = 0.1, most: int = 12) -> tuple[float, float]:
    """The forward and the backward seconds of a local computation, the way the runtime runs it.

    Inputs were just written by whoever made them; what was saved for the backward pass comes from memory, and so does
    the memory that results are put in. The code is warm, as in a step that is full of such calls: before each timing
    the same is done with other tensors.
    """
    rule, node = rule_for(call.node), call.node
    bound = Call(
        node, call.at, call.reads, call.writes, call.wanted, overwrite=call.manner.overwrite, then=call.manner.then
    )
    others, inputs = (
        [_sample(type, region, format) for type, region in zip(node.input_types, call.reads, strict=True)]
        for _ in range(2)
    )
    cache = torch.zeros(CACHE_BYTES // 4)
    forward: list[float] = []
    backward: list[float] = []
    begin = time.perf_counter()
    with torch.no_grad():
        while len(forward) < 4 or (time.perf_counter() - begin < least_s and len(forward) < most):
            cache.add_(1)
            _, (held, other) = _timed_call(rule, bound, others)
            seconds, (output, saved) = _timed_call(rule, bound, inputs)
            forward.append(seconds)
            if any(call.wanted):
                cache.add_(1)
                _timed_gradient(rule, bound, other, torch.ones_like(held))
                backward.append(_timed_gradient(rule, bound, saved, torch.ones_like(output)))
    return typical(forward[1:]), typical(backward[1:]) if backward else 0.0


def _timed_call(rule: Rule, bound: Call, inputs: list[Tensor]) -> tuple[float, tuple[Tensor, Any]]:
    for x in inputs:
        if x.is_floating_point():
            x.mul_(1)
    start = time.perf_counter()
    made = _driven(rule.forward_stages(bound, inputs)) if isinstance(rule, StagedRule) else rule.forward(bound, inputs)
    return time.perf_counter() - start, made


def _timed_gradient(rule: Rule, bound: Call, saved: Any, grad: Tensor) -> float:
    start = time.perf_counter()
    if isinstance(rule, StagedRule):
        _driven(rule.backward_stages(bound, saved, grad))
    else:
        rule.backward(bound, saved, grad)
    return time.perf_counter() - start


def typical(times: list[float]) -> float:
    """The mean without the largest. On a busy host short calls are often spared and long ones never: means add up."""
    return fmean(sorted(times)[: max(1, len(times) - 1)])


def _driven(stages: Iterator[Tensor]) -> Any:
    """Runs a staged computation to its end; partial values come back as they are."""
    try:
        partial = next(stages)
        while True:
            partial = stages.send(partial)  # type: ignore[attr-defined]
    except StopIteration as end:
        return end.value


def _sample(type: TensorType, region: Region, format: str) -> Tensor:
    if not type.dtype.is_floating_point:
        return torch.zeros(region.shape, dtype=type.dtype)
    x = torch.randn(region.shape).to(type.dtype)
    return channels_last(x) if format == "channels_last" else x


def peak_flops(dtype: torch.dtype) -> tuple[float, float]:
    """The rate of a large convolution, and the flops at which a small one reaches half of it."""

    def rate(channels: int, size: int) -> tuple[float, float]:
        x = channels_last(torch.randn(1, channels, size, size).to(dtype))
        weight = torch.randn(channels, channels, 3, 3).to(dtype)
        flops = 2.0 * channels * channels * 9 * size * size
        times = []
        with torch.no_grad():
            for _ in range(8):
                start = time.perf_counter()
                torch.conv2d(x, weight, padding=1)
                times.append(time.perf_counter() - start)
        return flops, flops / min(times)  # what disturbs only slows down

    _, large = rate(64, 128)
    small_flops, small = rate(16, 32)
    return large, max(0.0, small_flops * (large / small - 1))


def memory_seconds_per_byte() -> float:
    """The inverse of the rate at which sums of large tensors read and write memory."""
    a, b, out = (torch.ones(4 << 20) for _ in range(3))
    times = []
    for _ in range(8):
        start = time.perf_counter()
        torch.add(a, b, out=out)
        times.append(time.perf_counter() - start)
    return min(times) / (3 * a.nbytes)


def call_overhead_s() -> float:
    """What a call of an op on next to no data takes."""
    x = torch.ones(8)
    times = []
    with torch.no_grad():
        for _ in range(300):
            start = time.perf_counter()
            torch.relu(x)
            times.append(time.perf_counter() - start)
    return 3 * median(times)  # of the runtime around it, two calls' worth
