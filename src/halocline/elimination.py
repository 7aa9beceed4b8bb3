"""Exact minima of sums of tables over one or two variables, by eliminating one variable after the other."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class TooWide(Exception):
    """Eliminating would need a table with more entries than allowed: the graph has no narrow order."""


def minimise(
    unary: Sequence[Array], pairs: Mapping[tuple[int, int], Array], most_entries: float = 4e8
) -> tuple[float, tuple[int, ...]]:
    """The least sum of `unary[v][x_v]` and `pairs[v, w][x_v, x_w]`, and the x that has it (the first, if several).

    Always eliminates the variable whose neighbours' table is smallest. Chains, residual blocks and U-Nets stay narrow.
    Raises TooWide where a table would have more than `most_entries` entries.
    """
    tables: list[tuple[tuple[int, ...], Array]] = [((v,), np.asarray(table)) for v, table in enumerate(unary)]
    tables += [(pair, np.asarray(table)) for pair, table in pairs.items()]
    sizes = [len(table) for table in unary]
    left = set(range(len(sizes)))
    neighbours: dict[int, set[int]] = {v: set() for v in left}
    for scope, _ in tables:
        for v in scope:
            neighbours[v] |= set(scope) - {v}
    choices: list[tuple[int, tuple[int, ...], NDArray[np.int64]]] = []
    total = 0.0
    while left:
        v = min(left, key=lambda v: (_entries(sizes, neighbours[v]) * sizes[v], v))
        if _entries(sizes, neighbours[v]) * sizes[v] > most_entries:
            raise TooWide
        touching = [(scope, table) for scope, table in tables if v in scope]
        tables = [(scope, table) for scope, table in tables if v not in scope]
        scope = tuple(sorted(neighbours[v]))
        best, which = _eliminated(v, scope, [sizes[w] for w in scope], sizes[v], touching)
        choices.append((v, scope, which))
        if scope:
            tables.append((scope, best))
        else:
            total += float(best)
        for w in scope:
            neighbours[w] |= set(scope) - {w}
            neighbours[w].discard(v)
        left.discard(v)
    chosen = [0] * len(sizes)
    for v, scope, which in reversed(choices):
        chosen[v] = int(which[tuple(chosen[w] for w in scope)])
    return total, tuple(chosen)


def _entries(sizes: Sequence[int], scope: set[int]) -> float:
    total = 1.0
    for v in scope:
        total *= sizes[v]
    return total


def _eliminated(
    v: int, scope: tuple[int, ...], sizes: list[int], values: int, touching: list[tuple[tuple[int, ...], Array]]
) -> tuple[Array, NDArray[np.int64]]:
    """The minimum over `v` of the sum of the tables that touch it, and where it is."""
    if not scope:
        table = np.sum([table for _, table in touching], axis=0)
        return np.min(table), np.asarray(np.argmin(table))
    best, entry = np.full(sizes, np.inf), np.empty(sizes)
    which = np.zeros(sizes, dtype=np.int64)
    first, *others = [_spread(table, names, (v, *scope)) for names, table in touching]
    # One value of v at a time: no table with all of v's values is ever built.
    for value in range(values):
        entry[...] = first[value]
        for table in others:
            entry += table[value]
        better = entry < best
        np.minimum(best, entry, out=best)
        np.copyto(which, value, where=better)
    return best, which


def _spread(table: Array, names: Sequence[int], scope: tuple[int, ...]) -> Array:
    """The table with its dims in the order of `scope`, and dims of size 1 for the variables it does not have."""
    order = sorted(range(len(names)), key=lambda i: scope.index(names[i]))
    table = np.transpose(table, order) if len(names) > 1 else table
    shape = [1] * len(scope)
    for i in order:
        shape[scope.index(names[i])] = -1
    sizes = iter(np.shape(table))
    return table.reshape([next(sizes) if extent == -1 else 1 for extent in shape])
