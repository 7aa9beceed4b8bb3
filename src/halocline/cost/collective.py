"""The time of messages and allreduces on a `Machine`, in seconds.

The formulas are those of Thakur, Rabenseifner and Gropp (2005), which the performance model of Dryden et al. (2019)
uses: alpha is a level's latency, beta its inverse bandwidth, gamma the machine's reduction rate, n the bytes.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, log2

from ..mesh import Mesh
from .machine import Level, Machine


def recursive_doubling_s(level: Level, gamma: float, ranks: int, nbytes: float) -> float:
    """log2(p) (alpha + n beta + n gamma): best for short messages."""
    return ceil(log2(ranks)) * (level.latency_s + nbytes * (level.seconds_per_byte + gamma))


def rabenseifner_s(level: Level, gamma: float, ranks: int, nbytes: float) -> float:
    """2 log2(p) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma: reduce-scatter, then allgather, both by halves."""
    share = (ranks - 1) / ranks * nbytes
    return 2 * ceil(log2(ranks)) * level.latency_s + share * (2 * level.seconds_per_byte + gamma)


def ring_s(level: Level, gamma: float, ranks: int, nbytes: float) -> float:
    """2 (p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma: neighbours only."""
    share = (ranks - 1) / ranks * nbytes
    return 2 * (ranks - 1) * level.latency_s + share * (2 * level.seconds_per_byte + gamma)


def flat_s(level: Level, gamma: float, ranks: int, nbytes: float) -> float:
    """The cheapest of the three over one level; 0 for one rank."""
    if ranks <= 1:
        return 0.0
    return min(algorithm(level, gamma, ranks, nbytes) for algorithm in (recursive_doubling_s, rabenseifner_s, ring_s))


def shared(level: Level) -> Level:
    """The level as each rank sees it when all ranks that share a link sum at once, as they do: they run one program."""
    return replace(level, seconds_per_byte=level.seconds_per_byte * level.shared_by)


def hierarchical_s(machine: Machine, ranks_by_level: Mapping[int, int], nbytes: float) -> float:
    """Reduce-scatter inside each level, allreduce of the shards over the slowest one, allgather on the way back."""
    total, shard = 0.0, nbytes
    levels = sorted(number for number, ranks in ranks_by_level.items() if ranks > 1)
    for number in levels[:-1]:
        ranks, level = ranks_by_level[number], shared(machine.levels[number])
        moved = shard * (ranks - 1) / ranks
        total += 2 * ceil(log2(ranks)) * level.latency_s
        total += moved * (2 * level.seconds_per_byte + machine.reduction_s_per_byte)
        shard /= ranks
    if levels:
        last = levels[-1]
        total += flat_s(shared(machine.levels[last]), machine.reduction_s_per_byte, ranks_by_level[last], shard)
    return total


def allreduce_s(machine: Machine, mesh: Mesh, axes: tuple[str, ...], nbytes: float) -> float:
    """The time to sum `nbytes` over the ranks along `axes`, by the cheapest algorithm."""
    key = (mesh.axes, axes, float(nbytes))
    if key not in machine.sums_s:
        machine.sums_s[key] = _allreduce_s(machine, mesh, axes, nbytes)
    return machine.sums_s[key]


def _allreduce_s(machine: Machine, mesh: Mesh, axes: tuple[str, ...], nbytes: float) -> float:
    by_level: dict[int, int] = {}
    for axis in axes:
        number = machine.level_of_axis(mesh, axis)
        by_level[number] = by_level.get(number, 1) * mesh.parts((axis,))
    if not by_level or nbytes <= 0:
        return 0.0
    slowest = shared(machine.levels[max(by_level)])
    flat = flat_s(slowest, machine.reduction_s_per_byte, mesh.parts(axes), nbytes)
    return min(flat, hierarchical_s(machine, by_level, nbytes)) if len(by_level) > 1 else flat


def gather_along_axes_s(machine: Machine, mesh: Mesh, axes: tuple[str, ...], nbytes: float) -> float:
    """The time to give every rank the rows of all, merged along one axis after the other (how moments travel)."""
    total = 0.0
    for axis in axes:
        level, others = machine.levels[machine.level_of_axis(mesh, axis)], mesh.parts((axis,)) - 1
        total += others * (level.latency_s + nbytes * level.seconds_per_byte)
    return total
