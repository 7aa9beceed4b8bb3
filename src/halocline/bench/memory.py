"""The memory of a training step: of one process, and of the fullest rank when every sample is split.

`python -m halocline.bench.memory [MODEL] [--ranks N] [--plan PLAN] [--size S] [--width W] [--batch B] [--json]`
"""

import copy
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from ..comm.comm import Comm
from ..comm.launch import launch
from ..errors import HaloclineError
from ..models.zoo import load
from ..step import parallelize
from .alive import Alive

TARGET = 0.35  # of one process, on 4 ranks


@dataclass(frozen=True)
class Net:
    """A net of the zoo for `batch` samples that are `size` wide, its channels multiplied by `width`."""

    name: str
    size: int
    batch: int
    width: float


@dataclass(frozen=True)
class Peaks:
    """Peaks of a step in bytes: `one_process` is plain PyTorch, `ranks` holds every rank's.

    Counted are the batch (of a rank: its part) and every tensor that an op of the forward or backward pass makes, so
    activations, what is kept for the backward pass, halos, and gradients. Parameters and buffers are not.
    """

    one_process: int
    ranks: tuple[int, ...]
    parameters: int

    @property
    def ratio(self) -> float:
        """The fullest rank's share of what one process takes."""
        return max(self.ranks) / self.one_process


def peaks(comm: Comm, net: Net, plan: str) -> Peaks:
    """Measures both on the ranks of `comm`; the same on every rank. Raises what `parallelize` raises."""
    entry = load(net.name)
    if entry.loss is None or entry.batch is None:
        raise HaloclineError(f"bench memory: {net.name} has no loss or no batch to train with. Take one that has.")
    made = (entry.build(net.size, net.width), entry.batch(net.size, net.batch, 0)) if comm.rank == 0 else None
    model, batch = comm.all_gather_object(made)[0]
    one_process = 0
    if comm.rank == 0:
        plain, loss = copy.deepcopy(model), entry.loss()
        with Alive(batch) as alive:
            loss(plain(*batch[:-1]), batch[-1]).backward()
        one_process = alive.peak
        del plain
    step = parallelize(model, entry.loss(), batch, plan, comm=comm)
    parts = tuple(part.clone() for part in step.scatter(*batch))
    for _ in range(2):
        step.zero_grad()
        with Alive(parts) as alive:
            step(*parts).backward()
    found = comm.all_gather_object((one_process, alive.peak))
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    return Peaks(found[0][0], tuple(peak for _, peak in found), parameters)


@click.command()
@click.argument("model", default="mesh-tangling-2k")
@click.option("--ranks", default=4, show_default=True)
@click.option("--plan", default="spatial", show_default=True)
@click.option("--size", default=512, show_default=True)
@click.option("--width", default=0.25, show_default=True)
@click.option("--batch", default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
@click.option("--rank-of", type=click.Path(path_type=Path), hidden=True)  # this process is a rank, and reports there
def main(
    model: str, ranks: int, plan: str, size: int, width: float, batch: int, as_json: bool, rank_of: Path | None
) -> None:
    """Peak memory of a training step of MODEL: on one process, and on the fullest of some ranks."""
    net = Net(model, size, batch, width)
    if rank_of is not None:
        from ..comm.connect import connect

        comm = connect()
        measured = peaks(comm, net, plan)
        if comm.rank == 0:
            rank_of.write_text(json.dumps(asdict(measured)))
        return
    with tempfile.TemporaryDirectory(prefix="halocline-") as folder:
        out = Path(folder) / "peaks.json"
        words = [model, "--plan", plan, "--size", str(size), "--width", str(width), "--batch", str(batch)]
        command = [sys.executable, "-m", "halocline.bench.memory", *words, "--rank-of", str(out)]
        if status := launch(command, ranks, threads=1):
            sys.exit(status)
        found = json.loads(out.read_text())
        measured = Peaks(found["one_process"], tuple(found["ranks"]), found["parameters"])
    if as_json:
        print(json.dumps(asdict(net) | {"plan": plan} | asdict(measured) | {"ratio": measured.ratio}))
    else:
        print(_told(net, plan, measured))


def _told(net: Net, plan: str, measured: Peaks) -> str:
    mib = float(1 << 20)
    return (
        f"{net.name}, {net.batch} x {net.size} x {net.size}, width {net.width:g}, parameters "
        f"{measured.parameters / mib:.1f} MiB\n"
        f"one process, plain PyTorch    {measured.one_process / mib:8.1f} MiB\n"
        f"fullest of {len(measured.ranks)} ranks, {plan:12} {max(measured.ranks) / mib:8.1f} MiB\n"
        f"ratio {measured.ratio:.3f}" + (f" (target on 4 ranks: {TARGET})" if len(measured.ranks) == 4 else "")
    )


if __name__ == "__main__":
    main()
