"""How training is shown while it goes on."""

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from halocline.train import Trained

LINES = 10  # where there is no terminal


def consoles(columns: int | None) -> tuple[Console, Console]:
    """For stdout and stderr; `columns` is the width of the terminal that stderr ends in, if a launcher stands between.

    What is written to a file is as wide as a table needs.
    """
    out, error = Console(), Console(stderr=True)
    if columns is not None:
        error = Console(stderr=True, force_terminal=True, width=columns)
    if not out.is_terminal:
        out = Console(width=columns or 120, soft_wrap=True)
    return out, error


def shown(training: Iterable[Trained], steps: int, lines: Console, bar: Console) -> Iterator[Trained]:
    """Passes on what `training` yields; with a progress bar if `bar` is a terminal, else with some lines on `lines`."""
    if not bar.is_terminal:
        every = max(1, -(-steps // LINES))
        for trained in training:
            if trained.number % every == 0 or trained.number == steps - 1:
                lines.print(
                    f"step {trained.number + 1:{len(str(steps))}}/{steps}  {_now(trained)}",
                    highlight=False,
                    markup=False,
                )
            yield trained
        return
    columns = (
        TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.fields[now]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=bar) as progress:
        task = progress.add_task("", total=steps, now="")
        for trained in training:
            progress.update(task, completed=trained.number + 1, now=_now(trained))
            yield trained


def _now(trained: Trained) -> str:
    return f"loss {trained.loss:.4f}  {trained.step_s:.3f} s/step"
