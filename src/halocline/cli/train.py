"""`halocline train`: train a net of the zoo, or of a file, with every sample split over the ranks."""

import dataclasses
import json
import statistics
from typing import TYPE_CHECKING, Any

import click

from halocline.cli.options import build, dtype_of, dtype_option, entry_of, model_options, plan_of
from halocline.cli.ranks import joined, relaunched
from halocline.errors import HaloclineError

if TYPE_CHECKING:
    from halocline.comm.comm import Comm

LR = {"sgd": 1e-2, "adam": 1e-3}
HELD_OUT_SAMPLES = 8
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

    entry, dtype, plan = entry_of(wish.model, wish.seed), dtype_of(wish.dtype), plan_of(wish.plan)
    if entry.loss is None:
        raise HaloclineError(f"{wish.model}: its factory returns no loss; let it return (model, loss, batch)")
    size, batch = wish.size or entry.size or 0, wish.batch or entry.batch_size or 1
    net = build(entry, size, wish.width, dtype, wish.seed)
    feed = feed_of(entry, size, batch, wish.samples, dtype, wish.seed)
    step = parallelize(net, entry.loss(), feed.like(), plan, comm=comm, seed=wish.seed)
    recipe = Recipe(wish.optimizer, LR[wish.optimizer] if wish.lr is None else wish.lr)

    first = comm.rank == 0
    out, error = consoles(wish.columns)
    middle = comm.size // 2
    found = rows(step.program, middle) if first else []
    if first and not wish.as_json:
        count, transport = sum(p.numel() for p in net.parameters()), f"{comm.size} ranks ({comm.name})"
        shapes = ", ".join("x".join(map(str, x.shape)) for x in feed.like())
        out.print(f"[bold]{wish.model}[/] ({count:,} parameters, {wish.dtype}), batch {shapes}, {wish.optimizer} at "
                  f"{recipe.lr:g}\nplan [cyan]{wish.plan}[/] on {transport}\n", highlight=False)  # fmt: skip
        out.print(table(found, middle))
        out.print()

    exam = None
    if wish.model in MESHES:
        held_out = feed_of(entry, size, batch, max(HELD_OUT_SAMPLES, batch), dtype, wish.seed + 1)
        exam = Exam(net, held_out, -(-HELD_OUT_SAMPLES // batch), plan, comm)
    scores = [exam.average_precision()] if exam else []
    twin = Twin(step, feed) if wish.check and first else None

    training, done = train(step, feed, recipe, wish.steps, twin), []
    for trained in shown(training, wish.steps, error if wish.as_json else out, error) if first else training:
        done.append(trained)
    scores += [exam.average_precision()] if exam else []
    losses = [trained.loss for trained in done]
    agreement = twin.agreement() if twin is not None else None

    step_s = statistics.median(trained.step_s for trained in done)
    ends = statistics.fmean(losses[:AVERAGED]), statistics.fmean(losses[-AVERAGED:])
    if first and wish.as_json:
        document = {
            "model": wish.model, "parameters": sum(p.numel() for p in net.parameters()), "dtype": wish.dtype,
            "ranks": comm.size, "transport": comm.name, "plan": wish.plan, "size": size, "width": wish.width,
            "batch": batch, "optimizer": wish.optimizer, "lr": recipe.lr, "steps": wish.steps,
            "layers": [dataclasses.asdict(row) for row in found], "losses": losses, "step_s": step_s,
            "average_precision": {"start": scores[0], "end": scores[1]} if scores else None,
            "check": agreement and {
                "passed": agreement.passed, "tolerance": agreement.tolerance, "loss": agreement.loss,
                "gradients": agreement.gradients, "buffers": agreement.buffers,
            },
        }  # fmt: skip
        print(json.dumps(document))
    elif first:
        out.print(f"\nloss {ends[0]:.4f} -> {ends[1]:.4f} (means of the first and last {min(AVERAGED, wish.steps)} "
                  f"steps), {step_s:.3f} s per step", highlight=False)  # fmt: skip
        if scores:
            out.print(f"average precision on {HELD_OUT_SAMPLES} held-out meshes {scores[0]:.3f} -> {scores[1]:.3f}",
                      highlight=False)  # fmt: skip
        if agreement is not None:
            out.print(str(agreement), style="green" if agreement.passed else "red", highlight=False)
    passed = comm.all_gather_object(agreement is None or agreement.passed)
    return 0 if all(passed) else 1
