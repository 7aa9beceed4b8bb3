"""The planner's problem as tables: for each group the cost of each candidate, for each pair of groups the cost between.

A plan's additive cost is the sum of its entries. `seconds` holds time, `nbytes` what stays in memory until the backward
pass, `sums` the time of gradient sums if nothing hides them, `behind` the backward time under which they can hide.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .candidates import Group
from .cost.pairs import Array
from .graph import Graph
from .mesh import Mesh
from .ops import rule_for
from .placement import Plan, Split


@dataclass(frozen=True)
class Variable:
    """A group with its candidates, and what each costs by itself."""

    group: Group
    splits: tuple[Split, ...]
    seconds: Array
    sums: Array
    behind: Array
    nbytes: Array

    def only(self, chosen: Sequence[int]) -> "Variable":
        """The variable with some of its candidates."""
        at = np.asarray(chosen, dtype=np.int64)
        return Variable(
            self.group, tuple(self.splits[i] for i in chosen), self.seconds[at], self.sums[at], self.behind[at],
            self.nbytes[at],
        )  # fmt: skip


@dataclass(frozen=True)
class Edge:
    """Between the candidates of two variables (rows, columns): seconds, and bytes kept for the backward pass."""

    source: int
    target: int
    seconds: Array
    nbytes: Array


@dataclass(frozen=True)
class Problem:
    """All variables and edges of a graph on a mesh and a machine."""

    graph: Graph
    mesh: Mesh
    variables: tuple[Variable, ...]
    edges: tuple[Edge, ...]

    def cost(self, chosen: Sequence[int]) -> float:
        """The additive time of a choice, gradient sums left out."""
        total = sum(float(v.seconds[i]) for v, i in zip(self.variables, chosen, strict=True))
        return total + sum(float(e.seconds[chosen[e.source], chosen[e.target]]) for e in self.edges)

    def kept(self, chosen: Sequence[int]) -> float:
        """The bytes that a choice keeps for the backward pass."""
        total = sum(float(v.nbytes[i]) for v, i in zip(self.variables, chosen, strict=True))
        return total + sum(float(e.nbytes[chosen[e.source], chosen[e.target]]) for e in self.edges)

    def plan(self, chosen: Sequence[int], origin: str) -> Plan:
        """The plan of a choice."""
        splits: dict[str, Split] = {}
        for variable, i in zip(self.variables, chosen, strict=True):
            for node in variable.group.nodes:
                splits[node.name] = variable.group.split_of(node, variable.splits[i])
        inputs = {}
        for name in self.graph.inputs:
            inputs[name] = first_wants(self.graph, name, splits)
        return Plan(self.mesh, {n.name: splits.get(n.name, {}) for n in self.graph.nodes}, inputs, origin)


def first_wants(graph: Graph, name: str, splits: Mapping[str, Split]) -> dict[int, tuple[str, ...]]:
    """The dims of a batch tensor that its first reader splits, so that it comes as it is read."""
    if name not in graph.readers:
        return {}
    reader = graph.readers[name][0]
    dims = rule_for(reader).signature(reader).inputs[reader.inputs.index(name)]
    split = splits.get(reader.name, {})
    return {dim: split[index] for dim, index in enumerate(dims) if index is not None and split.get(index)}
