"""`halocline bench`: several ways to do one step, measured in turns."""

import json
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from halocline.cli.progress import consoles

if TYPE_CHECKING:
    from halocline.bench.race import Result
    from halocline.bench.workload import Workload


@click.command()
@click.argument("kind", type=click.Choice(["micro", "peers", "fidelity"]))
@click.option("--only", multiple=True, help="Only this layer or net; may be given several times.")
@click.option(
    "--rounds", type=click.IntRange(1), default=5, show_default=True, help="How often each side has its turn."
)
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="Steps of a side in its turn.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
@click.pass_obj
def command(arguments: list[str], /, kind: str, only: tuple[str, ...], rounds: int, steps: int, as_json: bool) -> int:
    """Measure a step: KIND is micro (single convolutions), peers (whole nets), or fidelity (the performance model).

    For fidelity nets run under several plans on one and two ranks, beside what the model says of each. Of the others
    all sides run in one go and take turns, so what else the machine does falls on all of them. Times are medians, of
    the slowest rank each; the ratio is to the best of one process with two threads, whatever its settings.
    """
    if kind == "fidelity":
        return _fidelity(only, as_json)
    from halocline.bench.peers import MICRO, NETS, micro_sides, sides_of
    from halocline.bench.race import race

    chosen: Mapping[str, Workload] = MICRO if kind == "micro" else NETS
    unknown = [name for name in only if name not in chosen]
    if unknown:
        raise click.BadParameter(f"`{unknown[0]}` is not among {', '.join(chosen)}", param_hint="--only")
    document: dict[str, Any] = {"kind": kind, "machine": _machine(), "workloads": {}}
    for name in only or chosen:
        workload = chosen[name]
        sides = micro_sides(workload) if kind == "micro" else sides_of(workload)
        click.echo(f"{name}: {len(sides)} sides", err=True)
        results = race(sides, workload, rounds, steps, lambda text: click.echo(f"  {text}", err=True))
        document["workloads"][name] = _summary(workload, results)
        if not as_json:
            _show(name, workload, document["workloads"][name])
    if as_json:
        print(json.dumps(document))
    return 0


def _fidelity(only: tuple[str, ...], as_json: bool) -> int:
    from halocline.bench.fidelity import document, fidelity, table

    rows = fidelity(lambda text: click.echo(text, err=True), only[0] if only else None)
    if as_json:
        print(json.dumps(document(rows)))
    else:
        consoles(None)[0].print(table(rows))
    return 0


def _machine() -> dict[str, Any]:
    import os

    import torch

    names = [line.split(":")[1].strip() for line in _cpu_lines() if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__}


def _cpu_lines() -> list[str]:
    try:
        with open("/proc/cpuinfo") as lines:
            return lines.readlines()
    except OSError:
        return []


def _summary(workload: "Workload", results: "list[Result]") -> dict[str, Any]:
    best = min((r.median_s for r in results if r.side.kind == "plain" and r.side.threads == 2), default=None)
    return {
        "workload": str(workload),
        "sides": [
            {
                "name": result.side.name, "median_s": result.median_s, "spread": result.spread,
                "ratio": result.median_s / best if best else None, "memory_bytes": result.memory_bytes,
                "seconds": result.seconds, "spent_s": dict(result.spent_s),
            }
            for result in results
        ],
    }  # fmt: skip


def _show(name: str, workload: "Workload", summary: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"{name}: {workload}", title_justify="left")
    for column in ("side", "step, ms", "spread", "ratio", "peak memory, MB"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for side in summary["sides"]:
        ratio = f"{side['ratio']:.3f}" if side["ratio"] else ""
        table.add_row(
            side["name"], f"{1e3 * side['median_s']:.2f}", f"± {100 * side['spread']:.0f} %", ratio,
            f"{side['memory_bytes'] / 1e6:.0f}",
        )  # fmt: skip
    consoles(None)[0].print(table)
    for side in summary["sides"]:
        whole = sum(side["spent_s"].values())
        shares = [f"{what} {seconds / whole:.1%}" for what, seconds in side["spent_s"].items() if seconds > whole / 250]
        if shares:
            click.echo(f"{side['name']} spends its step on: {', '.join(shares)}")
