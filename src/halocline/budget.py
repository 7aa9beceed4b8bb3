"""The cheapest choice whose memory keeps within a budget: Lagrangian relaxation, then branch and bound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .elimination import Array, minimise

Pairs = Mapping[tuple[int, int], Array]
SOLVES = 60  # how many relaxed problems branch and bound may solve before it gives the gap instead


@dataclass(frozen=True)
class Within:
    """A choice within the budget, its time, and a bound that no choice within the budget is below."""

    chosen: tuple[int, ...]
    seconds: float
    bound_s: float


@dataclass(frozen=True)
class Tight:
    """Times and bytes of all choices, and the bytes that may be used."""

    seconds: Sequence[Array]
    pair_seconds: Pairs
    nbytes: Sequence[Array]
    pair_nbytes: Pairs
    budget_bytes: float

    def time(self, chosen: Sequence[int]) -> float:
        return _total(self.seconds, self.pair_seconds, chosen)

    def memory(self, chosen: Sequence[int]) -> float:
        return _total(self.nbytes, self.pair_nbytes, chosen)

    def relaxed(self, price: float, allowed: Mapping[int, Array] | None = None) -> tuple[float, tuple[int, ...]]:
        """The least time + price * (bytes - budget), and its choice; `allowed` excludes candidates by adding inf."""
        allowed = allowed or {}
        unary = [s + price * b + allowed.get(v, 0.0) for v, (s, b) in enumerate(zip(self.seconds, self.nbytes))]
        pairs = {key: table + price * self.pair_nbytes[key] for key, table in self.pair_seconds.items()}
        value, chosen = minimise(unary, pairs)
        return value - price * self.budget_bytes, chosen

    def least_memory(self) -> tuple[float, tuple[int, ...]]:
        """The fewest bytes of any choice, and the choice."""
        return minimise(list(self.nbytes), self.pair_nbytes)


def _total(unary: Sequence[Array], pairs: Pairs, chosen: Sequence[int]) -> float:
    total = sum(float(table[i]) for table, i in zip(unary, chosen, strict=True))
    return total + sum(float(table[chosen[a], chosen[b]]) for (a, b), table in pairs.items())


def cheapest_within(tight: Tight) -> Within | None:
    """The cheapest choice within the budget, or None if there is none.

    Exact when the relaxation closes or the branches run out within `SOLVES` problems; else `bound_s` says how far the
    choice is from the best one at most.
    """
    bound, chosen = tight.relaxed(0.0)
    if tight.memory(chosen) <= tight.budget_bytes:
        return Within(chosen, tight.time(chosen), bound)
    least, fewest = tight.least_memory()
    if least > tight.budget_bytes:
        return None
    best = _improved(tight, fewest)
    low, high = 0.0, 1e-15
    fits = fewest
    price_of_bound = 0.0
    for step in range(48):
        price = high if high < 1e-2 and fits is fewest else (low * high) ** 0.5 if low else high / 10
        value, chosen = tight.relaxed(price)
        if value > bound:
            bound, price_of_bound = value, price
        if tight.memory(chosen) <= tight.budget_bytes:
            high, fits = price, chosen
            better = _improved(tight, chosen)
            best = better if tight.time(better) < tight.time(best) else best
        else:
            low = price
            high = price * 10 if fits is fewest else high
        if high / max(low, 1e-18) < 1.02 or tight.time(best) <= bound * (1 + 1e-9) or (low > 1e-3 and step > 20):
            break
    return _branch(tight, best, bound, price_of_bound)


def _improved(tight: Tight, chosen: tuple[int, ...]) -> tuple[int, ...]:
    """Changes one variable at a time, the best change first, as long as the time falls within the budget."""
    current = list(chosen)
    for _ in range(4 * len(current)):
        time, memory = tight.time(current), tight.memory(current)
        found: tuple[float, int, int] | None = None
        for v in range(len(current)):
            times, sizes = _changes(tight, current, v)
            good = (memory + sizes - sizes[current[v]] <= tight.budget_bytes) & (times < times[current[v]] - 1e-15)
            if good.any():
                at = int(np.argmin(np.where(good, times, np.inf)))
                gain = float(times[at] - times[current[v]])
                if found is None or gain < found[0]:
                    found = gain, v, at
        if found is None or found[0] > -1e-12 * time:
            break
        current[found[1]] = found[2]
    return tuple(current)


def _changes(tight: Tight, current: Sequence[int], v: int) -> tuple[Array, Array]:
    """Times and bytes of every candidate of `v` with its edges, the others as they are."""
    times, sizes = np.array(tight.seconds[v]), np.array(tight.nbytes[v])
    for (a, b), table in tight.pair_seconds.items():
        if a == v:
            times, sizes = times + table[:, current[b]], sizes + tight.pair_nbytes[a, b][:, current[b]]
        elif b == v:
            times, sizes = times + table[current[a], :], sizes + tight.pair_nbytes[a, b][current[a], :]
    return times, sizes


def _branch(tight: Tight, best: tuple[int, ...], bound: float, price: float) -> Within:
    """Branch and bound on the relaxation at `price`."""
    time = tight.time(best)
    open_problems: list[tuple[float, int, dict[int, Array]]] = [(bound, 0, {})]
    solves = made = 0
    while open_problems and solves < SOLVES:
        open_problems.sort(key=lambda problem: problem[:2])
        below, _, allowed = open_problems.pop(0)
        if below >= time * (1 - 1e-9):
            return Within(best, time, time)
        value, chosen = tight.relaxed(price, allowed)
        solves += 1
        if not np.isfinite(value) or value >= time * (1 - 1e-9):
            continue
        if tight.memory(chosen) <= tight.budget_bytes and tight.time(chosen) < time:
            best, time = chosen, tight.time(chosen)
        # Take the choice apart: either v keeps its candidate, or it takes another one.
        v = max(
            (v for v in range(len(chosen)) if np.isfinite(_left(tight, v, allowed)).sum() > 1),
            key=lambda v: abs(float(tight.nbytes[v][chosen[v]])),
            default=None,
        )
        if v is None:
            continue
        fixed = np.full(len(tight.seconds[v]), np.inf)
        fixed[chosen[v]] = 0.0
        rest = _left(tight, v, allowed).copy()
        rest[chosen[v]] = np.inf
        for part in (fixed, rest):
            made += 1
            open_problems.append((value, made, {**allowed, v: part}))
    lowest = min((below for below, _, _ in open_problems), default=time)
    return Within(best, time, min(time, max(bound, lowest)))


def _left(tight: Tight, v: int, allowed: Mapping[int, Array]) -> Array:
    return allowed.get(v, np.zeros(len(tight.seconds[v])))
