"""Options that several commands share."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from halocline.errors import HaloclineError, PlanError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from halocline.comm.comm import Comm
    from halocline.graph import Graph
    from halocline.models.zoo import Entry
    from halocline.step import PlanSpec

Command = TypeVar("Command", bound=Callable[..., Any])
DTYPES = {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "fp16": "float16"}

OPTIONS = (
    click.argument("model"),
    click.option("--ranks", type=click.IntRange(1), help="Start this many ranks on this host (default: one)."),
    click.option("--plan", default="auto", show_default=True, metavar="PLAN",
                 help="auto (the planner's), sample, spatial, numbers as in n=2,h=2, or a JSON file: a plan, or a "
                 "split per module."),
    click.option("--size", type=click.IntRange(1), help="Width of a sample (default: the model's usual one)."),
    click.option("--width", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True,
                 help="Times the model's usual number of channels."),
    click.option("--batch", type=click.IntRange(1), help="Samples in a batch."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the weights and the data."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there."),
    click.option("--columns", type=int, hidden=True),  # of the terminal that ranks started by this command write to
)  # fmt: skip


def model_options(command: Command) -> Command:
    """MODEL and the options that say which net, how large, and how it is split."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def dtype_option(default: str) -> Callable[[Command], Command]:
    return click.option("--dtype", type=click.Choice(list(DTYPES)), default=default, show_default=True)


def dtype_of(name: str) -> "torch.dtype":
    import torch

    found: torch.dtype = getattr(torch, DTYPES[name])
    return found


def plan_of(text: str, graph: Callable[[], "Graph"], ranks: int) -> "PlanSpec":
    """A phrase as it is; a plan, or a dict from patterns of module names to phrases, from a JSON file.

    Raises PlanError for a file that is neither, and for a plan that is not for this `graph` on so many ranks.
    """
    from halocline.plan_file import read_plan

    path = Path(text)
    if path.suffix != ".json" and not path.is_file():
        return text
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"--plan {text}: the file cannot be read as JSON: {error}") from error
    if isinstance(document, Mapping) and "halocline_plan" not in document:
        if all(isinstance(phrase, str) for phrase in document.values()):
            return document
        raise PlanError(f"--plan {text}: neither a plan nor a dict from patterns of module names to splits")
    return read_plan(path, graph(), ranks)


@dataclass(frozen=True)
class Loaded:
    """What MODEL and its options stand for, on this rank."""

    entry: "Entry"
    net: "nn.Module"
    plan: "PlanSpec"
    size: int
    batch: int


def load_on(
    comm: "Comm",
    model: str,
    plan: str,
    size: int | None,
    width: float,
    batch: int | None,
    dtype: "torch.dtype",
    seed: int,
) -> Loaded:
    """Reads the files that MODEL and PLAN name and builds the net, with the weights of `seed`.

    Raises HaloclineError, on every rank, where one of them fails, for a size that the model cannot have, and for a plan
    that was made for another model, size, batch or number of ranks.
    """
    import torch

    from halocline.agreement import together
    from halocline.models.zoo import load
    from halocline.planning import captured

    def made() -> Loaded:
        torch.manual_seed(seed)  # a file may draw its weights when it is read
        entry = load(model)
        samples, wide = batch or entry.batch_size or 1, size or entry.size or 0
        torch.manual_seed(seed)
        try:
            net = entry.build(wide, width).to(dtype)
        except ValueError as error:
            raise HaloclineError(str(error)) from error
        spec = plan_of(plan, lambda: captured(entry, wide, samples, width, dtype), comm.size)
        return Loaded(entry, net, spec, wide, samples)

    return together(comm, f"loading {model}", made)
