"""The command `halocline`. Each subcommand has a file of its own, which is imported when it is called."""

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import click

from halocline.cli.ranks import DEBUG, interrupted
from halocline.garbage import not_collected

COMMANDS = ("train", "verify", "plan", "calibrate", "simulate", "bench", "fuzz", "run")
PLANNING = {"plan", "simulate"}  # they only import, capture and compute, and are short


class Commands(click.Group):
    """Finds a command in the file of its name: `halocline --help` need not wait for torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"halocline.cli.{name}").command
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="halocline")
def cli() -> None:
    """Train an ordinary PyTorch CNN with every sample split over many processes, exactly as one process would."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line; exits 0 on success, 2 for a wrong call, 130 when interrupted, else 1."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with not_collected(until_exit=True) if set(given[:1]) & PLANNING else nullcontext():
            status: Any = cli.main(given, prog_name="halocline", standalone_mode=False, obj=given)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        interrupted()
    except Exception as error:
        if os.environ.get(DEBUG) == "1":
            traceback.print_exc()
        else:
            print(f"halocline: {paragraph(error)}", file=sys.stderr)
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)


def paragraph(error: Exception) -> str:
    """An error on one line; for one that is not halocline's own, its kind and how to see more."""
    from halocline.errors import HaloclineError

    text = " ".join(str(error).split())
    if isinstance(error, HaloclineError):
        return text
    notes = " ".join(getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {text} {notes}".strip() + " (HALOCLINE_DEBUG=1 shows the traceback)"


if __name__ == "__main__":
    main()
