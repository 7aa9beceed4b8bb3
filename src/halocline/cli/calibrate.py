"""`halocline calibrate`: measures this host as a machine to plan for."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from halocline.cli.ranks import joined, relaunched

if TYPE_CHECKING:
    from halocline.comm.comm import Comm


@click.command()
@click.argument("model", required=False)
@click.option("--ranks", type=click.IntRange(1), help="Start this many ranks on this host (default: one).")
@click.option("--batch", type=click.IntRange(1), help="Samples in a batch of MODEL.")
@click.option("--size", type=click.IntRange(1), help="Width of a sample of MODEL.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the machine to this TOML file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
@click.option("--columns", type=int, hidden=True)
@click.pass_obj
def calibrate_command(
    arguments: list[str], /, model: str | None, ranks: int | None, batch: int | None, size: int | None,
    output: str | None, as_json: bool, columns: int | None,
) -> int:  # fmt: skip
    """Measure this host with N ranks: messages, sums, local computation; kept for plans on machine `this`.

    With MODEL also the layers that its best plan asks for are measured, each at its local shape.
    """
    if (status := relaunched(ranks, arguments)) is not None:
        return status
    with joined() as comm:
        return _calibrate(comm, model, batch, size, output, as_json, columns)


def _calibrate(
    comm: "Comm", model: str | None, batch: int | None, size: int | None, output: str | None, as_json: bool,
    columns: int | None,
) -> int:  # fmt: skip
    from halocline.cli.progress import consoles
    from halocline.cost.calibrate import calibrate, save, this_machine
    from halocline.errors import PlanError
    from halocline.models.zoo import load
    from halocline.planning import Asked, captured, measured_plan
    from halocline.report.explain import milliseconds
    from halocline.step_overhead import with_step_overhead

    _, error = consoles(columns)

    def progress(what: str, done: int, total: int) -> None:
        if comm.rank == 0 and sys.stderr.isatty() | (columns is not None):
            error.print(f"calibrating: {what} ({done}/{total})", end="\r", highlight=False)

    found = with_step_overhead(calibrate(comm, progress), comm, progress)
    if comm.rank == 0:
        save(found, comm.size)
    comm.all_gather_object(None)
    document = {"machine": found.machine.to_toml(), "residuals": dict(found.residuals), "ranks": comm.size}
    lines = [found.machine.to_toml()]
    lines += [f"# {name}: the formula is off by {value:.0%} in the median" for name, value in found.residuals.items()]
    if model is not None:
        entry = load(model)
        graph = captured(entry, size, batch or entry.batch_size or 1)
        planned = measured_plan(Asked(graph, comm.size, this_machine(comm.size)), comm, progress)
        document["planned"] = {"seconds": planned.estimate.seconds, "splits": planned.plan.origin}
        lines.append(
            f"# {model}: the best plan takes {milliseconds(planned.estimate.seconds)} a step, by measured layers"
        )
    if comm.rank == 0:
        if output is not None:
            try:
                Path(output).write_text(found.machine.to_toml())
            except OSError as problem:
                raise PlanError(f"-o {output}: cannot be written: {problem.strerror or problem}") from problem
        print(json.dumps(document) if as_json else "\n".join(lines))
    return 0


command = calibrate_command
