"""Runs several sides in turns: each is started once, and all take a few steps in every round.

What else the machine does then falls on all sides alike, and ratios of medians can be trusted where times cannot.
"""

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from threading import Event, Thread

from halocline.bench import worker
from halocline.bench.workload import Workload, as_dict
from halocline.errors import HaloclineError

START_S = 300.0  # until a side that has not come is given up


@dataclass(frozen=True)
class Side:
    """One way to do the step.

    `kind` is `plain` (one process), `jax` (one process with two devices), `halocline`, `ddp` or `shardtensor` (ranks).
    """

    name: str
    kind: str
    ranks: int = 1
    threads: int = 1
    channels_last: bool = False
    tuned: bool = True  # glibc keeps freed memory instead of returning it to the kernel
    plan: str = "spatial"
    transport: str = "mpi"


@dataclass(frozen=True)
class Result:
    """The times of a side's steps (of the slowest rank each), in s, and the peak memory of its fullest rank.

    `spent_s` says what a step of halocline is spent on, on rank 0: seconds by op, for `exchange` and for `sums`.
    Memory is what the process took beyond what it had before it built the model, in bytes.
    """

    side: Side
    seconds: tuple[float, ...]
    memory_bytes: int
    spent_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, over the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median_s


def race(
    sides: Sequence[Side],
    workload: Workload,
    rounds: int,
    steps: int,
    told: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """`rounds` times `steps` steps of every side, in turns, after two to warm up.

    Raises HaloclineError, naming the side, when one does not come or ends early.
    """
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="halocline-bench-"))
        key = secrets.token_hex(16)
        listener = stack.enter_context(Listener(str(Path(directory) / "driver"), authkey=bytes.fromhex(key)))
        ranks: dict[str, list[Connection]] = {}
        for side in sides:
            told(f"starting {side.name}")
            ranks[side.name] = _start(stack, side, workload, listener, key)
        times: dict[str, list[float]] = {side.name: [] for side in sides}
        memory = dict.fromkeys(times, 0)
        for number in range(rounds + 1):
            told(f"round {number} of {rounds}" if number else "warming up")
            for side in sides:
                seconds, peak = _run(side, ranks[side.name], steps if number else 2)
                memory[side.name] = max(memory[side.name], peak)
                if number:
                    times[side.name] += seconds
        spent = {side.name: _spent(ranks[side.name]) for side in sides if side.kind == "halocline"}
        for side in sides:
            for connection in ranks[side.name]:
                connection.send(0)
    return [Result(side, tuple(times[side.name]), memory[side.name], spent.get(side.name, {})) for side in sides]


def _start(stack: ExitStack, side: Side, workload: Workload, listener: Listener, key: str) -> list[Connection]:
    told = {**side.__dict__, "workload": as_dict(workload), "address": listener.address, "key": key}
    program = [worker.__file__, json.dumps(told)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(side.threads)}
    if side.kind in ("plain", "jax"):
        if side.tuned:
            environment |= {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
        command = [sys.executable, *program]
    else:
        transport = side.transport if side.kind == "halocline" else "gloo"
        launcher = [sys.executable, "-m", "halocline.cli.main", "run", "-n", str(side.ranks), "--transport", transport]
        command = [*launcher, *program]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    stack.callback(_end, process)
    connections: list[Connection] = []
    started = Event()
    watch = Thread(target=_wake, args=(process, listener.address, key, started), daemon=True)
    watch.start()
    for _ in range(side.ranks):
        connections.append(listener.accept())
        if connections[-1].recv() is None:
            raise HaloclineError(f"benchmark: {side.name} did not start; what it printed says why")
    started.set()
    watch.join()
    return connections


def _wake(process: "subprocess.Popen[bytes]", address: str | tuple[str, int], key: str, started: Event) -> None:
    """Comes in place of a side that ended, or is too late, so that nobody waits for it."""
    for _ in range(int(START_S / 0.2)):
        if started.wait(0.2):
            return
        if process.poll() is not None:
            break
    with Client(address, authkey=bytes.fromhex(key)) as driver:
        driver.send(None)


def _spent(ranks: Sequence[Connection]) -> Mapping[str, float]:
    for connection in ranks:
        connection.send(worker.WHERE)
    answers: list[Mapping[str, float]] = [connection.recv() for connection in ranks]
    return answers[0]


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


def _run(side: Side, ranks: Sequence[Connection], steps: int) -> tuple[list[float], int]:
    try:
        for connection in ranks:
            connection.send(steps)
        answers = [connection.recv() for connection in ranks]
    except (EOFError, ConnectionError) as error:
        raise HaloclineError(f"benchmark: {side.name} ended in the middle of a round; its output says why") from error
    return [max(step) for step in zip(*(seconds for seconds, _ in answers))], max(peak for _, peak in answers)
