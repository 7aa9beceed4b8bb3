"""What the planning commands share: nets captured without memory, machines by name, sizes in words."""

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .capture import capture
from .comm.comm import Comm
from .cost.calibrate import Progress, measure_calls, silent, this_machine
from .cost.estimate import estimate
from .cost.local_times import LocalTimes, local_times
from .cost.machine import Machine, load_machine
from .errors import HaloclineError, PlanError
from .graph import Graph
from .models.zoo import Entry
from .search import Found, search

UNITS = {"": 1, "b": 1, "kb": 1000, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30,
         "tib": 1 << 40, "tb": 10**12}  # fmt: skip
MEASURED_ROUNDS = 4  # of planning with what was measured and measuring what the plan asks for


def size_of(text: str) -> int:
    """The bytes in `16GiB`, `500 MB` or `4096`. Raises PlanError for a text that is no size above 0."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if not found or found[2].lower() not in UNITS or not (nbytes := int(float(found[1]) * UNITS[found[2].lower()])):
        raise PlanError(f"`{text}` is not a size of memory; expected a number above 0 and a unit, as in 16GiB or 500MB")
    return nbytes


def machine_of(name: str, ranks: int) -> Machine:
    """The machine of that name or file; `this` is the calibrated one of this host, or a quick estimate."""
    return this_machine(ranks) if name == "this" else load_machine(name)


def captured(
    entry: Entry, size: int | None, batch: int, width: float = 1.0, dtype: torch.dtype = torch.float32
) -> Graph:
    """The graph of an entry's training step at a size and a batch, without memory for either where that is possible.

    Raises HaloclineError for an entry without loss or batch, or a size that the model cannot have.
    """
    if entry.loss is None or entry.batch is None:
        raise HaloclineError(
            f"{entry.name}: planning needs a loss and a batch; let the factory return (model, loss, batch)"
        )
    width_of = size or entry.size or 0
    try:
        if entry.size is None:
            return capture(entry.build(width_of, width).to(dtype), entry.loss(), entry.batch(width_of, batch, 0))[0]
        like = entry.batch(_small(entry), 1, 0)
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                model = entry.build(width_of, width)
                x, y = (_grown(part, _small(entry), width_of, batch, dtype) for part in like)
        finally:
            torch.set_default_dtype(usual)
        return capture(model, entry.loss(), (x, y))[0]
    except ValueError as error:
        raise HaloclineError(str(error)) from error


def _small(entry: Entry) -> int:
    """A size at which a batch is made quickly, to see its form."""
    return min(entry.size or 64, 64)


def _grown(part: Tensor, small: int, size: int, batch: int, dtype: torch.dtype) -> Tensor:
    shape = [batch, *(size if extent == small else extent for extent in part.shape[1:])]
    return torch.empty(shape, dtype=dtype if part.is_floating_point() else part.dtype)


@dataclass(frozen=True)
class Asked:
    """What is to be planned: a graph, for how many ranks of what machine, within what memory, by what method."""

    graph: Graph
    ranks: int
    machine: Machine
    memory_bytes: int | None = None
    method: str = "exact"

    def found(self, times: LocalTimes | None = None) -> Found:
        return search(self.graph, self.ranks, self.machine, self.memory_bytes, self.method, times)


def measured_plan(asked: Asked, comm: Comm, progress: Progress = silent) -> Found:
    """The plan with every local time that it rests on measured: plan, measure what it asks for, plan again.

    What was not measured is modelled, so a split that looks better than it is gets measured in the next round.
    """
    known = local_times(asked.machine, asked.graph)
    measured = dict(known.measured)
    for _ in range(MEASURED_ROUNDS):
        found = asked.found(replace(known, measured=measured))
        rests_on = replace(known, measured=measured, missing={})
        estimate(asked.graph, found.plan, asked.machine, rests_on)
        if not rests_on.missing:
            break
        measured |= measure_calls(comm, rests_on.missing.values(), known.format, progress)
    return found
