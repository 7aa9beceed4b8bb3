"""`halocline simulate`: steps on machines that are not here, event by event."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from halocline.cli.planning_options import planning_options

if TYPE_CHECKING:
    from rich.table import Table

    from halocline.scaling import Point


def _counts(ctx: click.Context, parameter: click.Parameter, text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"`{text}` is not a list of numbers such as 4,8,16") from error
    if any(count < 1 for count in found):
        raise click.BadParameter(f"`{text}`: ranks are numbers from 1 on")
    return found


@click.command()
@click.option("--ranks", required=True, callback=_counts, help="Numbers of ranks, as in 4,8,16.")
@click.option("--weak", is_flag=True, help="Let the batch grow with the ranks, from --batch for the first of them.")
@planning_options
@click.option("--trace", type=click.Path(dir_okay=False), help="Write the last step's timeline for ui.perfetto.dev.")
def simulate_command(
    model: str, ranks: list[int], machine: str, batch: int | None, weak: bool, size: int | None, width: float,
    memory: str | None, method: str, trace: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Plan MODEL for each number of ranks, and simulate a step of each plan on a machine.

    Compute and communication run beside each other where the program lets them, and ranks that share a link wait for
    each other. MODEL is a name in the zoo, or path/to/file.py:factory.
    """
    from rich.console import Console

    from halocline.models.zoo import load
    from halocline.planning import captured, machine_of, size_of
    from halocline.report.trace import write_trace
    from halocline.scaling import scaling, speedups

    entry = load(model)
    first = batch or entry.batch_size or 1
    batches = [max(1, first * count // ranks[0]) if weak else first for count in ranks]
    limit = size_of(memory) if memory is not None else None
    points = list(
        scaling(
            lambda n: captured(entry, size, n, width), machine_of(machine, max(ranks)), ranks, batches, limit, method
        )
    )
    gains = speedups(points, weak)
    simulated = [point.simulated for point in points if point.simulated]
    if trace is not None and simulated:
        write_trace(simulated[-1], Path(trace))
    if as_json:
        rows = [_row(point, gain) for point, gain in zip(points, gains)]
        print(json.dumps({"model": model, "machine": machine, "scaling": "weak" if weak else "strong", "steps": rows}))
    else:
        console = Console(width=None if Console().is_terminal else 150)
        console.print(_table(points, gains), soft_wrap=True)
        for point in points:
            if point.why_not:
                console.print(f"{point.ranks} ranks: {point.why_not}", highlight=False, markup=False)
    return 0 if simulated else 1


def _row(point: "Point", gain: float | None) -> dict[str, Any]:
    from halocline.report.explain import named_splits

    row: dict[str, Any] = {"ranks": point.ranks, "batch": point.batch}
    if point.found is None or point.simulated is None:
        return {**row, "why_not": point.why_not}
    cost = point.found.estimate
    return {
        **row, "simulated_seconds": point.simulated.seconds, "planned_seconds": cost.seconds, "speedup": gain,
        "samples_per_second": point.batch / point.simulated.seconds, "memory_bytes": cost.memory.total_bytes,
        "seconds_by_kind": dict(cost.totals), "splits": dict(named_splits(point.found)),
    }  # fmt: skip


def _table(points: "list[Point]", gains: list[float | None]) -> "Table":
    from rich.table import Table

    from halocline.report.explain import milliseconds, named_splits
    from halocline.search import gib

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("ranks", "batch", "step", "planned", "speed-up", "efficiency", "samples/s", "memory"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("splits from first to last layer", style="cyan")
    base = next((point.ranks for point in points if point.found), 1)
    for point, gain in zip(points, gains):
        if point.found is None or point.simulated is None:
            table.add_row(str(point.ranks), str(point.batch), "no plan")
            continue
        seconds = point.simulated.seconds
        splits = list(named_splits(point.found).values())
        changes = [split for split, before in zip(splits, ["", *splits]) if split != before]
        table.add_row(
            str(point.ranks), str(point.batch), milliseconds(seconds), milliseconds(point.found.estimate.seconds),
            f"{gain or 0:.2f}", f"{(gain or 0) * base / point.ranks:.0%}", f"{point.batch / seconds:.3g}",
            gib(point.found.estimate.memory.total_bytes), ", ".join(changes),
        )  # fmt: skip
    return table


command = simulate_command
