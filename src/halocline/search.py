"""The search for the best plan: exact by variable elimination, or as in the paper, within a memory limit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .budget import Tight, Within, cheapest_within
from .cost.estimate import Estimate, estimate
from .cost.local_times import LocalTimes, activation_format, local_times
from .cost.machine import Machine
from .cost.memory import consumers, persistent_bytes
from .elimination import Array, TooWide, minimise
from .errors import PlanError
from .garbage import not_collected
from .graph import Graph
from .mesh import Mesh
from .paper_search import paper_choice
from .placement import Plan
from .plan_file import signature_of
from .problem import Edge, Problem, Variable
from .tables import Tables

METHODS = ("exact", "paper")
FIRST = 12  # candidates a variable in the first, restricted solve that gives the upper bound
ROUNDS = 6  # of adjusting the budget of kept bytes to what passes through besides


@dataclass(frozen=True)
class Found:
    """A plan with everything that was known when it was chosen.

    `bound_s` is a time that no plan within the memory limit beats, by the model (None: the method gives none). The
    search is exact but for what hides gradient sums and for a hard memory limit; `gap` says by how much at most.
    `chosen` numbers each variable's candidate in `problem`.
    """

    plan: Plan
    estimate: Estimate
    problem: Problem
    chosen: tuple[int, ...]
    bound_s: float | None
    memory_limit_bytes: int | None

    @cached_property
    def gap(self) -> float | None:
        """By which share of its time the plan may be above the best one at most; None where no bound is known."""
        if self.bound_s is None or not self.estimate.seconds:
            return None
        return max(0.0, 1.0 - self.bound_s / self.estimate.seconds)


def plan(
    graph: Graph,
    mesh: Mesh | int,
    machine: Machine,
    memory_bytes: int | None = None,
    method: str = "exact",
    times: LocalTimes | None = None,
) -> Plan:
    """The plan with the least predicted time of a training step on `machine` that fits into `memory_bytes` a rank.

    `mesh` is a mesh or a number of ranks; memory is the machine's if it is not given. Equal inputs give equal plans.
    Raises PlanError when nothing fits, naming the largest consumers and the smallest number of ranks that would.
    """
    return search(graph, mesh, machine, memory_bytes, method, times).plan


@not_collected()
def search(
    graph: Graph,
    mesh: Mesh | int,
    machine: Machine,
    memory_bytes: int | None = None,
    method: str = "exact",
    times: LocalTimes | None = None,
) -> Found:
    """`plan`, with the estimate and the alternatives it was chosen from."""
    if method not in METHODS:
        raise PlanError(f"search method `{method}` is not known; there are {', '.join(METHODS)}")
    limit = machine.memory_bytes if memory_bytes is None else memory_bytes
    if limit <= 0:
        raise PlanError(f"memory limit {limit} bytes: expected more than 0")
    mesh = machine.mesh(mesh) if isinstance(mesh, int) else mesh
    if mesh.size > machine.capacity:
        raise PlanError(f"machine `{machine.name}` has {machine.capacity} ranks, but the mesh is {mesh}")
    return _Search(graph, mesh, machine, limit, method, times or local_times(machine, graph)).found()


class _Search:
    def __init__(self, graph: Graph, mesh: Mesh, machine: Machine, limit: int, method: str, times: LocalTimes) -> None:
        self.graph, self.mesh, self.machine, self.limit, self.method = graph, mesh, machine, limit, method
        self.times = times
        self.tables = Tables(graph, mesh, machine, times)
        self.fixed = sum(persistent_bytes(graph))
        self.last: Found | None = None

    def found(self) -> Found:
        variables = self.tables.variables()
        if not variables:
            raise PlanError("nothing in the model depends on the batch: there is nothing to plan")
        first = self._restricted(variables)
        upper = self._solved(first, budget=self.limit - self.fixed)
        if upper is not None and self.method == "exact":
            problem = self._narrowed(variables, self._time(first, upper.chosen))
        else:
            problem = self._problem(variables)
        best: Found | None = None
        for choose in (self._exact, self._paper) if self.method == "exact" else (self._paper,):
            found = choose(problem)
            if found is not None and (best is None or found.estimate.seconds < best.estimate.seconds * (1 - 1e-12)):
                best = found if best is None else replace(found, bound_s=best.bound_s)
        if best is None:
            raise self._refusal(problem)
        return best

    def _problem(self, variables: Sequence[Variable]) -> Problem:
        return Problem(self.graph, self.mesh, tuple(variables), self.tables.edges(variables))

    def _restricted(self, variables: Sequence[Variable]) -> Problem:
        """The problem with the few candidates of each variable that are cheapest alone, or hold least memory."""
        chosen = []
        for variable in variables:
            cheap = np.argsort(variable.seconds, kind="stable")[:FIRST]
            small = np.argsort(variable.nbytes, kind="stable")[: FIRST // 3]
            chosen.append(variable.only(sorted({*map(int, cheap), *map(int, small)})))
        return self._problem(chosen)

    def _narrowed(self, variables: Sequence[Variable], upper_s: float) -> Problem:
        """The problem without the candidates that no plan as good as `upper_s` can have.

        A plan with candidate c of v takes at least c's own time and the least times of all other variables.
        """
        least = [float(v.seconds.min()) for v in variables]
        slack = upper_s * (1 + 1e-9) - sum(least)
        kept = [v.only([int(i) for i in np.flatnonzero(v.seconds - low <= slack)]) for v, low in zip(variables, least)]
        return self._problem(kept)

    def _weights(self) -> tuple[float, ...]:
        """With which weights gradient sums are charged: what cannot be hidden, and more where it may not be."""
        exposed = 1.0 - self.machine.overlap
        return tuple(dict.fromkeys((exposed, exposed + (1 - exposed) / 3, exposed + (1 - exposed) * 2 / 3, 1.0)))

    def _solved(self, problem: Problem, budget: float) -> Within | None:
        """The best choice over all weights within the budget of kept bytes; its bound is that of the least weight."""
        best: Within | None = None
        bound = 0.0
        for number, weight in enumerate(self._weights()):
            tight = self._tight(problem, weight, budget)
            within = cheapest_within(tight)
            if within is None:
                return None
            bound = within.bound_s if number == 0 else bound
            seconds = self._time(problem, within.chosen)
            if best is None or seconds < best.seconds * (1 - 1e-12):
                best = Within(within.chosen, seconds, 0.0)
        return best and replace(best, bound_s=bound)

    def _tight(self, problem: Problem, weight: float, budget: float) -> Tight:
        seconds = [v.seconds + weight * v.sums for v in problem.variables]
        return Tight(
            seconds, {(e.source, e.target): e.seconds for e in problem.edges},
            [v.nbytes for v in problem.variables], {(e.source, e.target): e.nbytes for e in problem.edges}, budget,
        )  # fmt: skip

    def _time(self, problem: Problem, chosen: Sequence[int]) -> float:
        """The time of a choice with its gradient sums run beside the backward pass, one after the other."""
        clock = free = blocked = 0.0
        overlap = self.machine.overlap
        moving = _edge_seconds(problem.edges, chosen)
        for number in reversed(range(len(chosen))):
            variable, i = problem.variables[number], chosen[number]
            clock += float(variable.behind[i]) + moving.get(number, 0.0) / 2
            sums = float(variable.sums[i])
            if sums:
                free = max(clock, free) + overlap * sums
                blocked += (1 - overlap) * sums
        return problem.cost(chosen) + max(0.0, free - clock) + blocked

    def _exact(self, problem: Problem) -> Found | None:
        budget = float(self.limit - self.fixed)
        for _ in range(ROUNDS):
            try:
                within = self._solved(problem, budget)
            except TooWide:
                return None
            if within is None:
                return None
            found = self._as_found(problem, within.chosen, max(within.bound_s, self._sums_bound(problem)))
            over = found.estimate.memory.total_bytes - self.limit
            if over <= 0:
                return found
            kept = problem.kept(within.chosen)
            budget = min(budget, kept) - over
        return None

    def _sums_bound(self, problem: Problem) -> float:
        """A bound from gradient sums: what the backward pass is too short to hide is left, whatever the plan."""
        best = 0.0
        for share in (0.5, 1.0) if self.machine.overlap else ():
            hidden = share * self.machine.overlap
            unary = [v.seconds + (1 - self.machine.overlap + hidden) * v.sums - share * v.behind
                     for v in problem.variables]  # fmt: skip
            pairs = {(e.source, e.target): (1 - share / 2) * e.seconds for e in problem.edges}
            best = max(best, minimise(unary, pairs)[0])
        return best

    def _paper(self, problem: Problem) -> Found | None:
        """The paper's path; under a memory limit with a price on bytes that is raised until the plan fits."""
        for price in (0.0, *(10.0**exponent for exponent in range(-15, 0))):
            tight = self._tight(problem, 1.0, 0.0)
            unary: list[Array] = [s + price * b for s, b in zip(tight.seconds, tight.nbytes)]
            pairs = {key: table + price * tight.pair_nbytes[key] for key, table in tight.pair_seconds.items()}
            found = self._as_found(problem, paper_choice(unary, pairs), None)
            if found.estimate.memory.total_bytes <= self.limit:
                return found
        return None

    def _as_found(self, problem: Problem, chosen: tuple[int, ...], bound_s: float | None) -> Found:
        if (known := self.last) and known.problem is problem and known.chosen == chosen:  # both methods found the same
            return known
        origin = f"{self.method} search on {self.machine.name}"
        made = replace(problem.plan(chosen, origin), memory_format=activation_format(self.graph))
        cost = estimate(self.graph, made, self.machine, self.times)
        made = replace(
            made,
            seconds=cost.seconds,
            memory_bytes=cost.memory.total_bytes,
            made_for=signature_of(self.graph),
        )
        moving = self.tables.group_of
        same = cost.optimizer_s + sum(node.seconds for node in cost.nodes if node.name not in moving)
        bound_s = None if bound_s is None else min(bound_s + same, cost.seconds)
        self.last = Found(made, cost, problem, chosen, bound_s, self.limit)
        return self.last

    def _refusal(self, problem: Problem) -> PlanError:
        """Why nothing fits: what takes most in the leanest plan, and how many ranks it would take."""
        _, chosen = minimise(
            [v.nbytes for v in problem.variables], {(e.source, e.target): e.nbytes for e in problem.edges}
        )
        lean = self._as_found(problem, chosen, None)
        memory = lean.estimate.memory
        largest = ", ".join(f"{where} {gib(size)}" for where, size in list(consumers(self.graph, memory).items())[:3])
        enough = self._enough_ranks()
        advice = f"{enough} ranks would do" if enough else f"no number of ranks up to {64 * self.mesh.size} would do"
        return PlanError(
            f"no plan on {self.mesh.size} ranks of `{self.machine.name}` fits into {gib(self.limit)} a rank: the "
            f"leanest takes {gib(memory.total_bytes)} (parameters and optimizer {gib(self.fixed)}, kept for "
            f"the backward pass {gib(memory.kept_bytes)}). The largest: {largest}. Use more ranks ({advice}), a "
            "smaller batch, or more memory."
        )

    def _enough_ranks(self) -> int | None:
        """The smallest number of ranks tried on which the leanest plan fits: one more at a time, then doubled."""
        tried: list[int] = [*range(self.mesh.size + 1, 2 * self.mesh.size), *(self.mesh.size << s for s in range(1, 7))]
        for ranks in tried if self.mesh.size <= 8 else tried[-6:]:
            if ranks > self.machine.capacity:
                return None
            other = _Search(self.graph, self.machine.mesh(ranks), self.machine, self.limit, "exact", self.times)
            problem = other._restricted(other.tables.variables())
            _, chosen = minimise(
                [v.nbytes for v in problem.variables], {(e.source, e.target): e.nbytes for e in problem.edges}
            )
            if other._as_found(problem, chosen, None).estimate.memory.total_bytes <= self.limit:
                return ranks
        return None


def _edge_seconds(edges: Sequence[Edge], chosen: Sequence[int]) -> dict[int, float]:
    found: dict[int, float] = {}
    for edge in edges:
        seconds = float(edge.seconds[chosen[edge.source], chosen[edge.target]])
        found[edge.target] = found.get(edge.target, 0.0) + seconds
    return found


def gib(nbytes: float) -> str:
    """A size in words."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} bytes"
