"""`Sampled`: what a few ranks of a plan own, compute and read, at any number of ranks.

A `Placement` says it for all ranks; at thousands of them that takes longer than planning should. The layouts are the
same ones: where an index runs along an output dim one to one (seen from its first, middle and last part) the parts are
taken over instead of being asked for one by one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ..graph import Graph, Node
from ..layout import DimSplit, Layout
from ..mesh import Mesh
from ..ops import rule_for
from ..ops.rule import At, Signature
from ..placement import Plan, Split, box
from ..region import Region, balanced


@lru_cache(maxsize=4096)
def even_split(axes: tuple[str, ...], parts: int, size: int) -> DimSplit:
    """`size` in `parts` balanced intervals over `axes`."""
    return DimSplit(axes, balanced(size, parts))


def sample_ranks(mesh: Mesh) -> tuple[int, ...]:
    """The ranks that stand for all: every rank of a small mesh, else a corner and ranks with neighbours on all sides.

    Rank 0 has the largest parts, since the first parts of an uneven split get one more. A rank whose coordinates
    alternate between low and high is inside along any two or more neighbouring axes.
    """
    if mesh.size <= 4:
        return tuple(range(mesh.size))
    inside = []
    for phase in (0, 1):
        rank = 0
        for position, size in enumerate(mesh.sizes):
            middle = size // 2 if size > 2 else (position + phase) % 2
            rank = rank * size + middle
        inside.append(rank)
    return tuple(dict.fromkeys((0, *inside)))


def output_layout_of(mesh: Mesh, node: Node, signature: Signature, parts: Mapping[str, DimSplit]) -> Layout:
    """Who owns which part of the node's output."""
    rule = rule_for(node)
    dims = []
    for dim, (size, index) in enumerate(zip(node.type.shape, signature.output)):
        if index is None or index not in parts:
            dims.append(DimSplit((), ((0, size),)))
            continue
        split = parts[index]

        def written(number: int, dim: int = dim, index: str = index, split: DimSplit = split) -> tuple[int, int]:
            return rule.writes(node, box(node, {index: split.parts[number]})).intervals[dim]

        last = len(split.parts) - 1
        if size == split.size and all(written(i) == split.parts[i] for i in {0, last // 2, last}):
            dims.append(split)
        else:
            dims.append(DimSplit(split.axes, tuple(written(i) for i in range(last + 1))))
    return Layout(mesh, tuple(dims))


def parts_of(mesh: Mesh, signature: Signature, split: Split, inputs: list[Layout]) -> dict[str, DimSplit]:
    """The parts of each split index, as `placement.index_parts` finds them."""
    parts = {}
    for index, axes in split.items():
        if not axes:
            continue
        size = signature.indices[index]
        parts[index] = even_split(axes, mesh.parts(axes), size)
        for layout, dims in zip(inputs, signature.inputs):
            for dim, name in zip(layout.dims, dims):
                if name == index and dim.axes == axes and dim.size == size:
                    parts[index] = dim
    return parts


@dataclass(frozen=True)
class Sampled:
    """A graph under a plan, as the sample ranks see it."""

    graph: Graph
    plan: Plan

    @property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return sample_ranks(self.mesh)

    @cached_property
    def _resolved(self) -> tuple[dict[str, dict[str, DimSplit]], dict[str, Layout]]:
        graph, mesh = self.graph, self.mesh
        layouts = {name: _whole(mesh, graph.types[name].shape) for name in graph.replicated}
        for name, type in graph.inputs.items():
            axes = self.plan.inputs.get(name, {})
            dims = [even_split(axes.get(d, ()), mesh.parts(axes.get(d, ())), s) for d, s in enumerate(type.shape)]
            layouts[name] = Layout(mesh, tuple(dims))
        parts: dict[str, dict[str, DimSplit]] = {}
        for node in graph.nodes:
            signature = rule_for(node).signature(node)
            split = self.plan.splits.get(node.name, {})
            parts[node.name] = parts_of(mesh, signature, split, [layouts[name] for name in node.inputs])
            layouts[node.name] = output_layout_of(mesh, node, signature, parts[node.name])
        return parts, layouts

    @cached_property
    def parts(self) -> Mapping[str, Mapping[str, DimSplit]]:
        """For each node the parts of every index that is split."""
        return self._resolved[0]

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """For each value what every rank owns."""
        return self._resolved[1]

    def at(self, node: Node, rank: int) -> At:
        """The box of `node`'s index space that `rank` computes."""
        return box(node, {i: dim.parts[self.mesh.part(rank, dim.axes)] for i, dim in self.parts[node.name].items()})

    def over(self, node: Node) -> frozenset[str]:
        """The mesh axes along which ranks compute different parts of `node`."""
        return frozenset(axis for dim in self.parts[node.name].values() for axis in dim.axes)

    @cached_property
    def reads(self) -> Mapping[tuple[str, int], tuple[Region, ...]]:
        """For each node and sample rank the region it reads of each input."""
        return {
            (node.name, rank): rule_for(node).reads(node, self.at(node, rank))
            for node in self.graph.nodes
            for rank in self.ranks
        }

    @cached_property
    def writes(self) -> Mapping[tuple[str, int], Region]:
        """For each node and sample rank the region it makes."""
        return {
            (node.name, rank): rule_for(node).writes(node, self.at(node, rank))
            for node in self.graph.nodes
            for rank in self.ranks
        }


def _whole(mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    return Layout(mesh, tuple(DimSplit((), ((0, size),)) for size in shape))
