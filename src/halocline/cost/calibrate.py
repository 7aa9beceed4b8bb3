"""Calibration: this host as a `Machine`, kept in a cache by host, transport, ranks, torch version and threads."""

import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from ..comm.comm import Comm
from ..errors import PlanError
from .collective import flat_s
from .local_times import LocalCall, read_table, table_key
from .machine import Level, Machine, Roofline, parse_machine
from .measure import (
    call_overhead_s,
    measure_call,
    measure_messages,
    measure_overlap,
    measure_sums,
    memory_seconds_per_byte,
    peak_flops,
    slowest,
)

Progress = Callable[[str, int, int], None]  # what is measured, how much of it is done, of how much


@dataclass(frozen=True)
class Calibration:
    """A measured machine, and how well its formulas hold: median relative deviations, by what was measured."""

    machine: Machine
    residuals: Mapping[str, float]


def silent(what: str, done: int, total: int) -> None:
    """A progress that shows nothing."""


def calibrate(comm: Comm, progress: Progress = silent) -> Calibration:
    """Measures links, sums, overlap and local rates with all ranks of `comm` at work. The same on every rank."""
    steps = ("local computation", "messages", "sums", "overlap")
    progress(steps[0], 0, 4)
    peaks = {name: peak_flops(getattr(torch, name)) for name in ("float32", "float64", "bfloat16")}
    flops = {name: 1 / slowest(comm, 1 / rate) for name, (rate, _) in peaks.items()}
    local = Roofline(
        flops,
        slowest(comm, memory_seconds_per_byte()),
        1.0,
        median(float(value) for value in comm.all_gather_object(peaks["float32"][1])),
        slowest(comm, call_overhead_s()),
    )
    level, gamma, overlap = Level("host", None, 1e-5, 1e-10), 1e-10, 1.0
    residuals: dict[str, float] = {}
    if comm.size > 1:
        progress(steps[1], 1, 4)
        fit = comm.all_gather_object(measure_messages(comm))[0]
        level = Level(f"host ({comm.name})", None, fit.fixed_s, fit.per_byte_s)
        residuals["messages"] = fit.residual
        progress(steps[2], 2, 4)
        sums = comm.all_gather_object(measure_sums(comm))[0]
        share = (comm.size - 1) / comm.size
        rates = [t / n / share - 2 * level.seconds_per_byte for n, t in sums if n >= 1 << 16]
        gamma = max(1e-13, median(rates))
        deviations = [abs(flat_s(level, gamma, comm.size, n) - t) / t for n, t in sums]
        residuals["sums"] = median(deviations)
        progress(steps[3], 3, 4)
        overlap = float(comm.all_gather_object(measure_overlap(comm))[0])
    progress("done", 4, 4)
    notes = {"host": platform.node(), "torch": torch.__version__, "threads": torch.get_num_threads(),
             "ranks": comm.size, "transport": comm.name,
             **{f"residual_{name}": value for name, value in residuals.items()}}  # fmt: skip
    memory = host_memory_bytes() // comm.size
    return Calibration(Machine("this", (level,), memory, gamma, local, overlap, None, notes), residuals)


def quick_estimate(ranks: int) -> Machine:
    """This host as a machine from a second's measurements in this process; links are typical of shared memory."""
    rate, half = peak_flops(torch.float32)
    local = Roofline(
        {"float32": rate, "float64": rate / 2, "bfloat16": rate},
        memory_seconds_per_byte(),
        1.0,
        half,
        call_overhead_s(),
    )
    level = Level("host (estimated)", None, 1e-5, 2.5e-10)
    notes = {"host": platform.node(), "calibrated": "no: a quick estimate; `halocline calibrate` measures"}
    return Machine("this", (level,), host_memory_bytes() // ranks, 1e-10, local, 0.0, None, notes)


def host_memory_bytes() -> int:
    """The memory of this host, or of the container that this process may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return total


def cache_folder() -> Path:
    """Where calibrations are kept: `HALOCLINE_CACHE`, else the user's cache folder."""
    given = os.environ.get("HALOCLINE_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halocline"


def cache_name(ranks: int, threads: int) -> str:
    """What a calibration is kept by: host, torch version, ranks on the host, and threads of each."""
    words = f"{platform.node()}-torch{torch.__version__}-{ranks}x{threads}"
    return re.sub(r"[^A-Za-z0-9.x-]", "_", words)


def save(calibration: Calibration, ranks: int) -> Path:
    """Keeps a calibration in the cache; `this_machine` finds it. Raises PlanError where that cannot be written."""
    path = cache_folder() / f"{cache_name(ranks, torch.get_num_threads())}.toml"
    _write(path, calibration.machine.to_toml())
    return path


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}.tmp")
        beside.write_text(text)
        beside.replace(path)
    except OSError as error:
        raise PlanError(
            f"the calibration cache {path.parent} cannot be written: {error.strerror or error}. Set HALOCLINE_CACHE to "
            "a folder that can, or give -o FILE.toml."
        ) from error


def this_machine(ranks: int) -> Machine:
    """The calibrated machine of this host for `ranks` ranks of as many threads as now, else a quick estimate.

    Raises PlanError for a cached calibration that cannot be read.
    """
    folder, name = cache_folder(), cache_name(ranks, torch.get_num_threads())
    path, table = folder / f"{name}.toml", folder / f"{name}.json"
    machine = parse_machine(path.read_text(), str(path)) if path.is_file() else quick_estimate(ranks)
    return replace(machine, table=str(table)) if table.is_file() else machine


def known_times(ranks: int) -> dict[str, tuple[float, float]]:
    """The local times in the cache for `ranks` ranks of as many threads as now."""
    table = cache_folder() / f"{cache_name(ranks, torch.get_num_threads())}.json"
    return read_table(table) if table.is_file() else {}


def measure_calls(
    comm: Comm, calls: Iterable[LocalCall], format: str, progress: Progress = silent
) -> dict[str, tuple[float, float]]:
    """The times of local computations, each measured on all ranks at once: the mean over the ranks, the same on all.

    Every rank must pass the same calls. They are kept with those in the cache (rank 0 writes).
    """
    asked = list(calls)
    found: dict[str, tuple[float, float]] = {}
    for number, call in enumerate(asked):
        progress(call.node.op, number, len(asked))
        found[table_key(call, format)] = measure_together(comm, call, format)
    progress("done", len(asked), len(asked))
    if comm.rank == 0 and found:
        keep_times({**known_times(comm.size), **found}, comm.size)
    return found


def measure_together(comm: Comm, call: LocalCall, format: str) -> tuple[float, float]:
    """The times of a local computation that all ranks measure at once: the mean over them, the same on all."""
    comm.all_gather_object(None)
    forward, backward = zip(*comm.all_gather_object(measure_call(call, format)))
    return sum(forward) / comm.size, sum(backward) / comm.size


def keep_times(times: Mapping[str, tuple[float, float]], ranks: int) -> Path:
    """Writes local times to the cache. Raises PlanError where that cannot be done."""
    path = cache_folder() / f"{cache_name(ranks, torch.get_num_threads())}.json"
    document = {"local_times_s": {key: list(value) for key, value in sorted(times.items())}}
    _write(path, json.dumps(document, indent=0))
    return path
