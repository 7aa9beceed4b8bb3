"""Strong and weak scaling of the best plans, simulated for a list of numbers of ranks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .cost.local_times import local_times
from .cost.machine import Machine
from .errors import PlanError
from .graph import Graph
from .search import Found, search
from .simulate import Simulated, simulate


@dataclass(frozen=True)
class Point:
    """One number of ranks: the best plan's step, as planned and as simulated, or why there is none."""

    ranks: int
    batch: int
    found: Found | None
    simulated: Simulated | None
    why_not: str = ""

    @property
    def seconds(self) -> float | None:
        """The simulated time of a step."""
        return self.simulated.seconds if self.simulated else None


def scaling(
    graph_of: Callable[[int], Graph],
    machine: Machine,
    ranks: Sequence[int],
    batches: Sequence[int],
    memory_bytes: int | None = None,
    method: str = "exact",
) -> Iterator[Point]:
    """A point for each number of ranks with its batch; `graph_of` captures the net for a batch."""
    graphs: dict[int, Graph] = {}
    for count, batch in zip(ranks, batches, strict=True):
        if batch not in graphs:
            graphs[batch] = graph_of(batch)
        graph = graphs[batch]
        try:
            found = search(graph, count, machine, memory_bytes, method)
        except PlanError as error:
            yield Point(count, batch, None, None, str(error))
            continue
        yield Point(count, batch, found, simulate(graph, found.plan, machine, local_times(machine, graph)))


def speedups(points: Sequence[Point], weak: bool) -> list[float | None]:
    """Against the first point that has a plan: how much faster a step is (strong), or samples a second are (weak)."""
    first = next((point for point in points if point.seconds), None)
    if first is None or first.seconds is None:
        return [None] * len(points)
    found: list[float | None] = []
    for point in points:
        gain = point.batch / first.batch if weak else 1.0
        found.append(first.seconds / point.seconds * gain if point.seconds else None)
    return found
