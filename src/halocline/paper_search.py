"""The search of Dryden et al. (2019): a shortest path, and for branches the longest path first."""

from collections.abc import Mapping, Sequence

import numpy as np

from .elimination import Array


def paper_choice(unary: Sequence[Array], pairs: Mapping[tuple[int, int], Array]) -> tuple[int, ...]:
    """A choice for every variable: the longest path is solved exactly and fixed, then the next one through the rest.

    `pairs` are the edges of the layers' DAG, numbered in the order of execution. An edge between a path and layers that
    are fixed already counts; one to layers that are still free does not, which is why this can miss the minimum.
    """
    chosen: dict[int, int] = {}
    while len(chosen) < len(unary):
        path = _longest_path([v for v in range(len(unary)) if v not in chosen], pairs)
        tables = [_with_fixed(v, unary[v], pairs, chosen) for v in path]
        steps = [pairs[a, b] for a, b in zip(path, path[1:])]
        chosen |= dict(zip(path, _shortest(tables, steps)))
    return tuple(chosen[v] for v in range(len(unary)))


def _longest_path(free: list[int], pairs: Mapping[tuple[int, int], Array]) -> list[int]:
    """The path through free layers with the most layers; the first of several."""
    length, before = dict.fromkeys(free, 1), dict.fromkeys(free, -1)
    for a, b in sorted(pairs, key=lambda pair: (pair[1], pair[0])):
        if a in length and b in length and length[a] + 1 > length[b]:
            length[b], before[b] = length[a] + 1, a
    path = [max(free, key=lambda v: (length[v], -v))]
    while before[path[-1]] >= 0:
        path.append(before[path[-1]])
    return path[::-1]


def _with_fixed(v: int, table: Array, pairs: Mapping[tuple[int, int], Array], chosen: Mapping[int, int]) -> Array:
    total = np.array(table, dtype=np.float64)
    for (a, b), costs in pairs.items():
        if a == v and b in chosen:
            total += costs[:, chosen[b]]
        elif b == v and a in chosen:
            total += costs[chosen[a], :]
    return total


def _shortest(tables: list[Array], steps: list[Array]) -> list[int]:
    """The cheapest choice along a chain."""
    best, origins = tables[0], []
    for table, step in zip(tables[1:], steps):
        sums = best[:, None] + step
        origins.append(np.argmin(sums, axis=0))
        best = np.min(sums, axis=0) + table
    path = [int(np.argmin(best))]
    for origin in reversed(origins):
        path.append(int(origin[path[-1]]))
    return path[::-1]
