"""`halocline plan`: the best split of every layer, by the model of a machine."""

import json
from pathlib import Path

import click

from halocline.cli.planning_options import planning_options


@click.command()
@click.option("--ranks", type=click.IntRange(1), required=True, help="For how many ranks.")
@planning_options
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the plan to this file.")
def plan_command(
    model: str, ranks: int, machine: str, batch: int | None, size: int | None, width: float, memory: str | None,
    method: str, as_json: bool, output: str | None,
) -> int:  # fmt: skip
    """Find the best split of every layer of MODEL over the ranks of a machine, and say why.

    Nothing is trained and no memory is taken: nets of any size can be planned on any host. MODEL is a name in the zoo,
    or path/to/file.py:factory.
    """
    from rich.console import Console

    from halocline.errors import PlanError
    from halocline.models.zoo import load
    from halocline.planning import Asked, captured, machine_of, size_of
    from halocline.report.explain import as_document, shown

    entry = load(model)
    graph = captured(entry, size, batch or entry.batch_size or 1, width)
    limit = size_of(memory) if memory is not None else None
    found = Asked(graph, ranks, machine_of(machine, ranks), limit, method).found()
    if output is not None:
        try:
            Path(output).write_text(found.plan.to_json() + "\n")
        except OSError as error:
            raise PlanError(f"-o {output}: the plan cannot be written: {error.strerror or error}") from error
    if as_json:
        print(json.dumps({"model": model, "ranks": ranks, "machine": machine, **as_document(found)}))
    else:
        Console(width=None if Console().is_terminal else 150).print(shown(found), soft_wrap=True)
    return 0


command = plan_command
