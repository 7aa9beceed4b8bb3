"""`halocline train`: train a net of the zoo, or of a file, with every sample split over the ranks."""

import dataclasses
import json
import statistics
from typing import TYPE_CHECKING, Any

import click

from halocline.cli.options import dtype_of, dtype_option, load_on, model_options
from halocline.cli.ranks import joined, relaunched
from halocline.errors import HaloclineError

if TYPE_CHECKING:
    from halocline.comm.comm import Comm
    from halocline.train import Agreement

LR = {"sgd": 1e-2, "adam": 1e-3}
HELD_OUT = 8  # meshes
AVERAGED = 10  # steps at both ends over which the loss is averaged, since batches differ


@dataclasses.dataclass(frozen=True)
class Wish:
    """What was asked for on the command line."""

    model: str
    plan: str
    size: int | None
    width: float
    batch: int | None
    seed: int
    as_json: bool
    columns: int | None
    dtype: str
    steps: int
    optimizer: str
    lr: float | None
    samples: int
    check: bool


@click.command()
@model_options
@dtype_option("fp32")
@click.option("--steps", type=click.IntRange(1), default=100, show_default=True, help="Training steps.")
@click.option("--optimizer", type=click.Choice(list(LR)), default="adam", show_default=True)
@click.option("--lr", type=click.FloatRange(0), help="Learning rate (default: 1e-3 for adam, 1e-2 for sgd).")
@click.option("--samples", type=click.IntRange(1), default=256, show_default=True, help="Different meshes to train on.")
@click.option("--check", is_flag=True, help="Make every step in one process too, and compare.")
@click.pass_obj
def command(arguments: list[str], /, ranks: int | None, **wish: Any) -> int:
    """Train MODEL with every sample split over the ranks.

    MODEL is a name in the zoo, or path/to/file.py:factory with a factory that returns (model, loss, batch). Each rank
    makes only its own part of the mesh-tangling data. With --check, exits 1 if one process would have gone elsewhere.
    """
    if (status := relaunched(ranks, arguments)) is not None:
        return status
    with joined() as comm:
        return train_on(comm, Wish(**wish))


def train_on(comm: "Comm", wish: Wish) -> int:
    """Trains as one of the ranks of `comm`; the exit status."""
    from halocline.cli.progress import consoles, shown
    from halocline.cli.split_table import rows, table
    from halocline.feed import MESHES, feed_of
    from halocline.step import parallelize
    from halocline.train import Exam, Recipe, Twin, train

    dtype, first = dtype_of(wish.dtype), comm.rank == 0
    job = load_on(comm, wish.model, wish.plan, wish.size, wish.width, wish.batch, dtype, wish.seed)
    if job.entry.loss is None:
        raise HaloclineError(f"{wish.model}: its factory returns no loss; let it return (model, loss, batch)")
    recipe = Recipe(wish.optimizer, LR[wish.optimizer] if wish.lr is None else wish.lr)
    feed = feed_of(job.entry, job.size, job.batch, wish.samples, dtype, wish.seed)
    step = parallelize(job.net, job.entry.loss(), feed.like(), job.plan, comm=comm, seed=wish.seed)
    exam = None
    if wish.model in MESHES:
        meshes = max(HELD_OUT, job.batch)
        held_out = feed_of(job.entry, job.size, job.batch, meshes, dtype, wish.seed + 1)
        exam = Exam(job.net, held_out, -(-HELD_OUT // job.batch), job.plan, comm)

    out, error = consoles(wish.columns)
    middle = comm.size // 2
    layers = rows(step.program, middle) if first else []
    count = sum(p.numel() for p in job.net.parameters())
    if first and not wish.as_json:
        shapes = ", ".join("x".join(map(str, x.shape)) for x in feed.like())
        out.print(f"[bold]{wish.model}[/] ({count:,} parameters, {wish.dtype}), batch {shapes}, {wish.optimizer} at "
                  f"{recipe.lr:g}", highlight=False)  # fmt: skip
        out.print(f"plan [cyan]{wish.plan}[/] on {comm.size} ranks ({comm.name})\n", highlight=False)
        out.print(table(layers, middle))
        out.print()

    scores = [exam.average_precision()] if exam else []
    twin = Twin(step, feed) if wish.check and first else None
    training, done = train(step, feed, recipe, wish.steps, twin), []
    for trained in shown(training, wish.steps, error if wish.as_json else out, error) if first else training:
        done.append(trained)
    scores += [exam.average_precision()] if exam else []
    agreement = twin.agreement() if twin is not None else None

    outcome = Outcome([trained.loss for trained in done], [trained.step_s for trained in done], scores, agreement)
    if first and wish.as_json:
        document = {
            "model": wish.model, "parameters": count, "dtype": wish.dtype, "ranks": comm.size, "transport": comm.name,
            "plan": wish.plan, "size": job.size, "width": wish.width, "batch": job.batch, "optimizer": wish.optimizer,
            "lr": recipe.lr, "steps": wish.steps, "layers": [dataclasses.asdict(row) for row in layers],
        }  # fmt: skip
        print(json.dumps(document | outcome.document()))
    elif first:
        out.print()
        for line in outcome.lines():
            out.print(line, style="red" if line.startswith("DOES NOT") else None, highlight=False)
    passed = comm.all_gather_object(agreement is None or agreement.passed)
    return 0 if all(passed) else 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came out of training."""

    losses: list[float]
    step_s: list[float]
    scores: list[float]  # average precision at the start and at the end, for mesh-tangling nets
    agreement: "Agreement | None"

    def document(self) -> dict[str, Any]:
        found = self.agreement
        return {
            "losses": self.losses, "step_s": statistics.median(self.step_s),
            "average_precision": {"start": self.scores[0], "end": self.scores[1]} if self.scores else None,
            "check": found and {
                "passed": found.passed, "tolerance": found.tolerance, "loss": found.loss,
                "gradients": found.gradients, "buffers": found.buffers,
            },
        }  # fmt: skip

    def lines(self) -> list[str]:
        averaged = min(AVERAGED, max(1, len(self.losses) // 2))
        start, end = statistics.fmean(self.losses[:averaged]), statistics.fmean(self.losses[-averaged:])
        lines = [
            f"loss {start:.4f} -> {end:.4f} (means of the first and last {averaged} steps), "
            f"{statistics.median(self.step_s):.3f} s per step"
        ]
        if self.scores:
            before, after = self.scores
            lines.append(f"average precision on held-out meshes {before:.3f} -> {after:.3f}")
        return lines + ([str(self.agreement)] if self.agreement else [])
