"""The ranks of a command: started by it when it was started alone, else those it was started with."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import click

from halocline.errors import CommError, HaloclineError

if TYPE_CHECKING:
    from halocline.comm.comm import Comm

DEBUG = "HALOCLINE_DEBUG"
INTERRUPTED = 130
SHOW_CURSOR = "\x1b[?25h"
_joined: "Comm | None" = None


def relaunched(ranks: int | None, arguments: Sequence[str]) -> int | None:
    """The exit code of `ranks` ranks that ran this command with `arguments`; None when this process is a rank itself.

    Raises UsageError when the process was started as one of another number of ranks.
    """
    from halocline.comm.launch import launch
    from halocline.comm.started import find_start

    start = find_start(os.environ)
    if start.by != "hand":
        if ranks not in (None, start.size):
            raise click.UsageError(f"--ranks {ranks}, but {start.by} started {start.size} ranks. Leave --ranks out.")
        return None
    if ranks in (None, 1):
        return None
    terminal = ["--columns", str(os.get_terminal_size(2).columns)] if sys.stderr.isatty() else []
    status = launch([sys.executable, "-m", "halocline.cli.main", *arguments, *terminal], ranks)
    if status and terminal:
        sys.stderr.write(SHOW_CURSOR)  # a rank that was stopped could not
    return status


@contextmanager
def joined() -> Iterator["Comm"]:
    """The `Comm` of this rank; an error inside ends all ranks, and is told by one of them."""
    global _joined
    from halocline.comm.connect import connect

    comm = _joined = connect()
    if os.environ.get(DEBUG) == "1":
        comm.fail = _with_traceback(comm.fail)  # type: ignore[assignment, method-assign]
    try:
        yield comm
    except Exception as error:
        # What stops every rank at once is told by the first; the rest stops one, which must tell the others.
        if isinstance(error, HaloclineError) and not isinstance(error, CommError):
            if comm.rank != 0:
                if os.environ.get(DEBUG) == "1":
                    traceback.print_exc()
                sys.exit(1)
        else:
            comm.fail(f"{type(error).__name__}: {error}")
        raise


def _with_traceback(fail: Callable[[str], None]) -> Callable[[str], None]:
    """`fail`, which may end this process before anyone else can show where the error comes from."""

    def told(reason: str) -> None:
        traceback.print_exc()
        fail(reason)

    return told


def interrupted() -> NoReturn:
    """Ends this process after Ctrl-C, with the usual exit status 130."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _joined is not None and _joined.size > 1:
        os._exit(INTERRUPTED)  # to end in order would be to wait for ranks that have gone already
    sys.exit(INTERRUPTED)
