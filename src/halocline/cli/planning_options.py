"""What `halocline plan` and `halocline simulate` are both asked: of which net, at what size, on what machine."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

OPTIONS = (
    click.argument("model"),
    click.option("--machine", default="this", show_default=True, metavar="NAME|FILE",
                 help="lassen, dgx-h100, cpu-cluster, this host, or a TOML file."),
    click.option("--batch", type=click.IntRange(1), help="Samples in the whole batch."),
    click.option("--size", type=click.IntRange(1), help="Width of a sample (default: the model's usual one)."),
    click.option("--width", type=click.FloatRange(0, min_open=True), default=1.0, help="Times the usual channels."),
    click.option("--memory", metavar="SIZE", help="Memory of a rank, as in 16GiB (default: the machine's)."),
    click.option("--method", type=click.Choice(["exact", "paper"]), default="exact", show_default=True),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there."),
)  # fmt: skip


def planning_options(command: Command) -> Command:
    """MODEL and the options that say what is planned for which machine, within what memory and by what method."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command
