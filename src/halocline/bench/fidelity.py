"""How well the model predicts: steps and memory of nets under many plans, measured on this host and predicted."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ..capture import capture
from ..comm.comm import Comm
from ..cost.calibrate import Calibration, calibrate, measure_together
from ..cost.estimate import Estimate, estimate
from ..cost.local_times import LocalTimes, activation_format
from ..cost.measure import typical
from ..errors import HaloclineError
from ..models.zoo import ZOO
from ..step import Step, parallelize
from ..step_overhead import with_step_overhead
from .alive import Alive

STEPS = 7  # timed after two that warm up
PlanWords = str | dict[str, str]


@dataclass(frozen=True)
class Net:
    """A net of the zoo at a size that this host trains in a second, and the plans to try on two ranks."""

    name: str
    size: int
    batch: int
    width: float
    plans: Mapping[str, PlanWords]

    def __str__(self) -> str:
        return f"{self.name} {self.size} x{self.batch}"


def _planar(early: str) -> dict[str, PlanWords]:
    return {"sample": "n=2", "h": "h=2", "w": "w=2", "h, then samples": {early: "h=2", "*": "n=2"}}


NETS = (
    Net("mini-mesh", 256, 2, 1.0, _planar("*1_[1-4]")),
    Net("mini-mesh", 512, 2, 0.5, _planar("*1_[1-4]")),
    Net("mesh-tangling-1k", 256, 2, 0.125, _planar("*[12]_[1-5]")),
    Net("mesh-tangling-2k", 256, 2, 0.25, _planar("*[12]_[1-3]")),
    Net("resnet50", 96, 8, 0.5, _planar("layer1")),
    Net(
        "unet3d", 32, 2, 0.5, {"sample": "n=2", "d": "d=2", "h": "h=2", "d, then samples": {"down": "d=2", "*": "n=2"}}
    ),
)


@dataclass(frozen=True)
class Row:
    """One net under one plan: seconds of a step and bytes of tensors alive at its peak, measured and predicted."""

    net: str
    plan: str
    ranks: int
    measured_s: float
    predicted_s: float
    measured_bytes: int
    predicted_bytes: int
    spread: float  # of the measured steps: median deviation from their median, relative

    @property
    def error(self) -> float:
        """The relative error of the predicted time."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """The relative error of the predicted memory."""
        return self.predicted_bytes / self.measured_bytes - 1


def measured(step: Step, parts: Sequence[Tensor], comm: Comm) -> tuple[float, float, int]:
    """The seconds of a training step on the slowest rank, their spread, and the peak of tensors alive on this rank."""
    optimizer = torch.optim.SGD(step.parameters(), 1e-4, momentum=0.9)

    def train() -> None:
        step(*parts).backward()
        optimizer.step()
        optimizer.zero_grad()

    times = []
    for number in range(STEPS + 2):
        comm.all_gather_object(None)
        start = time.perf_counter()
        train()
        seconds = max(comm.all_gather_object(time.perf_counter() - start))
        times += [seconds] if number >= 2 else []
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    alive = Alive([*step.parameters(), *step.buffers(), *parts, *state])
    with alive:
        train()
    middle = typical(times)
    return middle, median(abs(t - middle) for t in times) / middle, alive.peak


def predicted(net: Net, step: Step, comm: Comm, machine: Calibration, known: dict[str, Any]) -> Estimate:
    """What the model says of the plan that the step runs, with every local time measured on all ranks at once."""
    entry = ZOO[net.name]
    assert entry.loss is not None and entry.batch is not None
    graph, _ = capture(step.model, entry.loss(), entry.batch(net.size, net.batch, 0))
    graph = graph.with_attr("batch_norm", "statistics", "global")
    times = LocalTimes(machine.machine, activation_format(graph), known)
    estimate(graph, step.plan, machine.machine, times)
    for key, call in times.missing.items():
        known[key] = measure_together(comm, call, times.format)
    return estimate(graph, step.plan, machine.machine, replace(times, missing={}))


def rows_on(comm: Comm, nets: Sequence[Net], tell: Callable[[str], None]) -> list[Row]:
    """The rows of all nets on the ranks of `comm`: whole on one rank, else under each of their plans."""
    machine, known, rows = with_step_overhead(calibrate(comm), comm), dict[str, Any](), list[Row]()
    for net in nets:
        entry = ZOO[net.name]
        assert entry.loss is not None and entry.batch is not None
        batch = entry.batch(net.size, net.batch, 0)
        for name, words in net.plans.items() if comm.size > 1 else (("whole", "whole"),):
            torch.manual_seed(0)
            step = parallelize(entry.build(net.size, net.width), entry.loss(), batch, words, comm=comm)
            parts = tuple(part.clone() for part in step.scatter(*batch))
            seconds, spread, peak = measured(step, parts, comm)
            cost = predicted(net, step, comm, machine, known)
            row = Row(str(net), name, comm.size, seconds, cost.seconds, peak, cost.memory.total_bytes, spread)
            rows.append(row)
            tell(
                f"{row.net}, {row.plan}, {row.ranks} ranks: {seconds * 1e3:.1f} ms, predicted {cost.seconds * 1e3:.1f}"
            )
    return rows


@dataclass(frozen=True)
class Summary:
    """Over all rows: errors of time and memory, and how far the predicted best plan of a net is from the best."""

    pairs: int
    median_error: float
    worst_error: float
    worst_memory_error: float
    worst_choice: float  # measured time of the plan predicted best over that of the plan measured best, minus 1


def summary(rows: Sequence[Row]) -> Summary:
    """The summary of the rows of several nets and numbers of ranks."""
    errors = [abs(row.error) for row in rows]
    choices = []
    for net in dict.fromkeys((row.net, row.ranks) for row in rows):
        plans = [row for row in rows if (row.net, row.ranks) == net]
        chosen = min(plans, key=lambda row: row.predicted_s)
        choices.append(chosen.measured_s / min(row.measured_s for row in plans) - 1)
    memory = max(abs(row.memory_error) for row in rows)
    return Summary(len(rows), median(errors), max(errors), memory, max(choices))


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows and their summary, for `--json`."""
    listed = [{**asdict(row), "error": row.error, "memory_error": row.memory_error} for row in rows]
    return {"rows": listed, "summary": asdict(summary(rows))}


def table(rows: Sequence[Row]) -> RenderableType:
    """The rows and their summary for a terminal."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("net", "plan"):
        shown.add_column(title, no_wrap=True)
    for title in ("ranks", "measured", "spread", "predicted", "error", "memory", "predicted", "error"):
        shown.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(
            row.net, row.plan, str(row.ranks), f"{row.measured_s * 1e3:.1f} ms", f"{row.spread:.0%}",
            f"{row.predicted_s * 1e3:.1f} ms", f"{row.error:+.0%}", f"{row.measured_bytes / 1e6:.0f} MB",
            f"{row.predicted_bytes / 1e6:.0f} MB", f"{row.memory_error:+.0%}",
        )  # fmt: skip
    found = summary(rows)
    text = (
        f"{found.pairs} pairs: error of the step time {found.median_error:.0%} in the median, {found.worst_error:.0%} "
        f"at worst; of the peak memory {found.worst_memory_error:.0%} at worst; the plan predicted best is within "
        f"{found.worst_choice:.0%} of the one measured best"
    )
    return Group(shown, Text(text))


def fidelity(tell: Callable[[str], None], only: str | None = None) -> list[Row]:
    """Measures and predicts all pairs on this host, on one rank and on two, each started anew with the same threads."""
    from ..comm.launch import launch

    rows: list[Row] = []
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory(prefix="halocline-") as folder:
            out = Path(folder) / "rows.json"
            command = [sys.executable, "-m", "halocline.bench.fidelity", str(out), *([only] if only else [])]
            if status := launch(command, ranks, threads=1):
                raise HaloclineError(f"bench fidelity: the measurement on {ranks} ranks ended with status {status}")
            rows += [Row(**row) for row in json.loads(out.read_text())]
            tell(f"{ranks} ranks: {len(rows)} pairs")
    return rows


def _worker(out: Path, only: str | None) -> None:
    from ..comm.connect import connect

    comm = connect()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    nets = [net for net in NETS if only is None or net.name == only]

    def tell(text: str) -> None:
        if comm.rank == 0:
            print(text, file=sys.stderr, flush=True)

    rows = rows_on(comm, nets, tell)
    if comm.rank == 0:
        out.write_text(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    _worker(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
