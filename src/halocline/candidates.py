"""What the planner may choose: which nodes are split together, and the splits of each such group.

A node *follows* the one that makes its input when it reads that input one to one, nothing else of the batch comes in,
and the producer can be split wherever the follower can. Then there is nothing to gain from another split for the
follower alone: its work shrinks with the parts exactly as the producer's does, and to move its output costs what it
costs to move its input, which has the same shape. So both share one choice. (The one exception, a producer that
is best computed whole although it could be split, is a candidate of both together.)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from .gradients import varying
from .graph import Graph, Node
from .mesh import Mesh
from .ops import rule_for
from .placement import Split, box

PLANNED = ("n", "d", "h", "w")  # the indices that a plan splits: samples and space


@dataclass(frozen=True)
class Group:
    """Nodes that share one split: the first of them, the leader, and its followers.

    `names` gives for each node its own name of each index of the leader.
    """

    leader: Node
    nodes: tuple[Node, ...]
    names: Mapping[str, Mapping[str, str]]

    @cached_property
    def indices(self) -> Mapping[str, int]:
        """The leader's indices that may be split, with their sizes."""
        indices = rule_for(self.leader).signature(self.leader).indices
        return {index: indices[index] for index in PLANNED if indices.get(index, 1) > 1}

    def split_of(self, node: Node, split: Split) -> Split:
        """The leader's split in the names of `node`."""
        return {self.names[node.name][index]: axes for index, axes in split.items()}


def groups(graph: Graph) -> tuple[Group, ...]:
    """The groups of all nodes that depend on the batch, in the order of their leaders."""
    moving = varying(graph)
    first_reader = {name: graph.readers[name][0].name for name in graph.inputs if name in graph.readers}
    members: dict[str, list[Node]] = {}
    names: dict[str, dict[str, dict[str, str]]] = {}
    leader_of: dict[str, str] = {}
    for node in graph.nodes:
        if node.name not in moving:
            continue
        values = {name for name in node.inputs if name in moving and first_reader.get(name) != node.name}
        producer = values.pop() if len(values) == 1 else None
        renamed = None
        if producer is not None and producer in leader_of:
            leader = leader_of[producer]
            renamed = _followed(members[leader], node, producer, names[leader][producer])
        if renamed is None:
            leader = node.name
            own = rule_for(node).signature(node).indices
            renamed = {index: index for index in PLANNED if own.get(index, 1) > 1}
            members[leader], names[leader] = [], {}
        members[leader].append(node)
        names[leader][node.name] = renamed
        leader_of[node.name] = leader
    return tuple(Group(nodes[0], tuple(nodes), names[leader]) for leader, nodes in members.items())


def _followed(members: list[Node], node: Node, producer: str, known: Mapping[str, str]) -> dict[str, str] | None:
    """The node's names of the leader's indices if it follows the member called `producer`, else None."""
    source = next(member for member in members if member.name == producer)
    there, here = rule_for(source).signature(source), rule_for(node).signature(node)
    dims = here.inputs[node.inputs.index(producer)]
    renamed: dict[str, str] = {}
    for index, own in known.items():
        if own not in there.output:
            return None
        dim = there.output.index(own)
        other = dims[dim]
        size = source.type.shape[dim]
        if other is None or here.indices[other] != size or there.indices[own] != size:
            return None
        renamed[index] = other
    splittable = {index for index in PLANNED if here.indices.get(index, 1) > 1}
    if not splittable <= set(renamed.values()):
        return None
    return renamed if _one_to_one(node, producer, dims, tuple(renamed.values())) else None


def _one_to_one(node: Node, producer: str, dims: tuple[str | None, ...], indices: tuple[str, ...]) -> bool:
    """Whether a part of the node's index space reads exactly that part of its input."""
    sizes = rule_for(node).signature(node).indices
    at = box(node, {index: (sizes[index] // 3, sizes[index] - sizes[index] // 3) for index in indices})
    read = rule_for(node).reads(node, at)[node.inputs.index(producer)].intervals
    return all(read[dim] == at[name] for dim, name in enumerate(dims) if name in indices)


@dataclass(frozen=True)
class Axes:
    """The mesh axes sorted into classes of equal size: within a class and a level any two can be exchanged."""

    mesh: Mesh

    @cached_property
    def classes(self) -> tuple[tuple[str, ...], ...]:
        sizes = sorted({size for _, size in self.mesh.axes if size > 1})
        return tuple(tuple(name for name, size in self.mesh.axes if size == wanted) for wanted in sizes)


@lru_cache(maxsize=64)
def compositions(total: int, bins: int) -> tuple[tuple[int, ...], ...]:
    """All ways to write `total` as a sum of `bins` numbers from 0."""
    if bins == 1:
        return ((total,),)
    return tuple((first, *rest) for first in range(total + 1) for rest in compositions(total - first, bins - 1))


def candidates(mesh: Mesh, indices: Mapping[str, int], alike: tuple[tuple[str, ...], ...] = ()) -> Iterator[Split]:
    """Every assignment of mesh axes to `indices` that leaves no part empty, replication included.

    Axes of equal size are taken in a fixed order: samples get the slowest ones, then space, and what holds replicas the
    fastest. Assignments that differ in the order only cost the same within a level of the interconnect; across levels
    this order is the best one, since samples never exchange anything between layers. Of the indices in a tuple of
    `alike` (dims along which the whole net is symmetric) an earlier one gets at least as many parts.
    """
    names = [index for index in PLANNED if index in indices]
    classes = Axes(mesh).classes
    for counts in product(*(compositions(len(axes), len(names) + 1) for axes in classes)):
        taken: dict[str, list[str]] = {name: [] for name in names}
        for axes, shares in zip(classes, counts):
            start = 0
            for name, share in zip(names, shares):
                taken[name] += axes[start : start + share]
                start += share
        parts = {name: mesh.parts(tuple(axes)) for name, axes in taken.items()}
        if any(parts[name] > indices[name] for name in names):
            continue
        if any(parts.get(a, 1) < parts.get(b, 1) for same in alike for a, b in zip(same, same[1:]) if a in parts):
            continue
        yield {name: mesh.ordered(frozenset(axes)) for name, axes in taken.items() if axes}


def alike_indices(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """The spatial indices along which the whole net is symmetric: equal sizes and equal windows everywhere."""
    ranks = [len(type.shape) for type in graph.inputs.values()]
    space = ("d", "h", "w")[5 - max([4, *ranks]) :] if max(ranks, default=4) <= 5 else ()
    for node in graph.nodes:
        sizes = rule_for(node).signature(node).indices
        here = [index for index in space if index in sizes]
        if len({sizes[index] for index in here}) > 1 or (here and len(here) < len(space)):
            return ()
        for value in node.attrs.values():
            if isinstance(value, (tuple, list)) and len(value) == len(space) and len(set(map(str, value))) > 1:
                return ()
        for type in node.input_types:
            if len(type.shape) == len(space) + 2 and len(set(type.shape[2:])) > 1:
                return ()
    return (space,) if len(space) > 1 else ()


def parts_in_words(mesh: Mesh, split: Split) -> str:
    """A split in words: `n/4 h/2`, or `whole`."""
    return " ".join(f"{index}/{mesh.parts(axes)}" for index, axes in split.items() if axes) or "whole"


def used(mesh: Mesh, split: Split) -> int:
    """Over how many ranks a split divides the work."""
    return prod(mesh.parts(axes) for axes in split.values())
