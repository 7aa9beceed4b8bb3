"""Splits by hand: what a user asks for in words becomes a `Plan`.

The words say how a layer's index space is divided: `sample`, `spatial`, `whole`, or `n=2,h=2,w=2`. A layer that is not
named follows its inputs: it is split along the indices that run along the dims along which they are split already, so
that nothing moves but halos. Where that is not possible its inputs are gathered.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NoReturn

from .errors import PlanError
from .graph import Graph, Node
from .mesh import Mesh
from .ops import rule_for
from .placement import Plan, Split

ORDER = ("n", "c", "f", "d", "h", "w")


def plan_by_hand(graph: Graph, mesh: Mesh, spec: str | Mapping[str, str]) -> Plan:
    """The plan for `spec`: one phrase for the whole net, or phrases by patterns of module names (first match counts).

    Raises PlanError for a phrase that does not exist, a pattern that no module matches, an index that no layer under
    the pattern has, and a split into more parts than an index is long.
    """
    if not isinstance(spec, str | Mapping):
        raise PlanError(f"plan: {spec!r} is not a phrase such as `spatial`, a dict from layers to phrases, or a Plan")
    if isinstance(spec, str):
        return _Following(graph, mesh, {}, parse(spec, mesh, graph, all_axes=True)).plan(spec)
    patterns = {pattern: parse(phrase, mesh, graph, all_axes=False) for pattern, phrase in spec.items()}
    for pattern, wanted in patterns.items():
        matched = [node for node in graph.nodes if _matches(pattern, node)]
        if not matched:
            raise PlanError(f"plan: no layer is named like `{pattern}` (layers: {_layers(graph)})")
        known = {index for node in matched for index in rule_for(node).signature(node).indices}
        for index in wanted:
            if index not in known:
                raise PlanError(f"plan: no layer under `{pattern}` has an index `{index}` (they have {sorted(known)})")
    return _Following(graph, mesh, patterns, {}).plan(", ".join(f"{key}: {value}" for key, value in spec.items()))


def parse(phrase: str, mesh: Mesh, graph: Graph, all_axes: bool) -> Split:
    """The mesh axes that each index named by `phrase` is split over.

    `sample` is n over all ranks, `spatial` the first spatial dim over all ranks, `whole` no split. Numbers take the
    mesh's axes in order, samples first, so that ranks that share a sample are neighbours.
    """
    first = next(iter(graph.inputs.values()), None)
    space = {5: "d", 4: "h", 3: "w"}.get(len(first.shape) if first else 4, "h")
    words: dict[str, Split] = {"sample": {"n": mesh.names}, "spatial": {space: mesh.names}, "whole": {}}
    if phrase in words:
        return {index: axes for index, axes in words[phrase].items() if axes}
    counts: dict[str, int] = {}
    for item in phrase.split(","):
        index, _, number = item.strip().partition("=")
        if index not in ORDER or not number.isdigit() or int(number) < 1:
            raise PlanError(f"plan `{phrase}`: `{item.strip()}` is not a split. Use sample, spatial, whole, or "
                            f"index=number with an index of {', '.join(ORDER)}, such as `n=2,h=2`.")  # fmt: skip
        counts[index] = int(number)
    rest, split = list(mesh.names), {}
    for index in sorted(counts, key=ORDER.index):
        split[index] = _take(rest, counts[index], mesh, phrase)
    if all_axes and rest:
        used = mesh.size // mesh.parts(tuple(rest))
        raise PlanError(f"plan `{phrase}` uses {used} of {mesh.size} ranks; make the numbers' product {mesh.size}")
    return {index: axes for index, axes in split.items() if axes}


def _take(rest: list[str], number: int, mesh: Mesh, phrase: str) -> tuple[str, ...]:
    """Takes axes out of `rest` whose sizes multiply to `number`."""
    taken = []
    for axis in tuple(rest):
        size = mesh.parts((axis,))
        if size > 1 and number % size == 0:
            taken.append(axis)
            rest.remove(axis)
            number //= size
    if number != 1:
        raise PlanError(
            f"plan `{phrase}` does not fit {mesh.size} ranks (mesh {mesh}): its numbers must be made of the mesh's "
            f"axes, and their product be {mesh.size}"
        )
    return tuple(taken)


def _matches(pattern: str, node: Node) -> bool:
    module = node.origin.module
    return any(fnmatchcase(name, pattern) for name in (module, node.name)) or module.startswith(pattern + ".")


def _layers(graph: Graph) -> str:
    names = list(dict.fromkeys(node.origin.module for node in graph.nodes if node.origin.module))
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


class _Following:
    """Goes through the nodes in order and remembers along which dims each value is split."""

    def __init__(self, graph: Graph, mesh: Mesh, patterns: Mapping[str, Split], default: Split) -> None:
        self.graph, self.mesh, self.patterns, self.default = graph, mesh, patterns, default
        self.dims: dict[str, dict[int, tuple[str, ...]]] = {name: {} for name in graph.replicated}
        self.constant = set(graph.replicated)  # values that do not depend on the batch

    def plan(self, origin: str) -> Plan:
        splits: dict[str, Split] = {}
        for node in self.graph.nodes:
            signature = rule_for(node).signature(node)
            split = self._split(node, signature.indices)
            splits[node.name] = split
            for name, names in zip(
                node.inputs, signature.inputs
            ):  # an input of the batch comes as its first reader wants
                if name not in self.dims:
                    self.dims[name] = {dim: split[i] for dim, i in enumerate(names) if i is not None and i in split}
            self.dims[node.name] = {
                dim: split[i] for dim, i in enumerate(signature.output) if i is not None and i in split
            }
            if self.constant.issuperset(node.inputs):
                self.constant.add(node.name)
        inputs = {name: self.dims.get(name, {}) for name in self.graph.inputs}
        for index, axes in self.default.items():
            if not any(set(axes) <= set(split.get(index, ())) for split in splits.values()):
                self._refuse(index, axes, origin)
        return Plan(self.mesh, splits, inputs, origin)

    def _refuse(self, index: str, axes: tuple[str, ...], phrase: str) -> NoReturn:
        sizes = [rule_for(node).signature(node).indices.get(index, 0) for node in self.graph.nodes]
        parts, longest = self.mesh.parts(axes), max(sizes, default=0)
        found = f"is at most {longest} long" if longest else "is in no layer one that can be split"
        raise PlanError(
            f"plan `{phrase}`: no layer can be split as asked, in {parts} parts along index `{index}`, which {found}. "
            "Use fewer ranks, or another split."
        )

    def _split(self, node: Node, indices: Mapping[str, int]) -> Split:
        if self.constant.issuperset(node.inputs) or node.name in self.graph.updates.values():
            return {}
        for pattern, wanted in self.patterns.items():
            if _matches(pattern, node):
                return self._asked(node, indices, pattern, wanted)
        votes: dict[str, dict[str, int]] = {}  # axis -> index -> bytes that are split so already
        order: dict[str, tuple[str, ...]] = {}
        for name, type, names in zip(node.inputs, node.input_types, rule_for(node).signature(node).inputs):
            for dim, axes in self.dims.get(name, {}).items():
                if (index := names[dim]) is not None:
                    order.setdefault(index, axes)
                    for axis in axes:
                        votes.setdefault(axis, {}).setdefault(index, 0)
                        votes[axis][index] += type.nbytes
        chosen = {axis: max(sizes, key=lambda index: sizes[index]) for axis, sizes in votes.items()}
        for index, default in self.default.items():
            if indices.get(index, 0) >= self.mesh.parts(default) and not chosen.keys() & set(default):
                chosen |= dict.fromkeys(default, index)
                order.setdefault(index, default)
        split: dict[str, tuple[str, ...]] = {}
        for index in dict.fromkeys(chosen.values()):
            taken = [axis for axis in order[index] if chosen.get(axis) == index]
            taken += [axis for axis in self.mesh.names if chosen.get(axis) == index and axis not in taken]
            split[index] = tuple(taken)
        return split

    def _asked(self, node: Node, indices: Mapping[str, int], pattern: str, wanted: Split) -> Split:
        for index, axes in wanted.items():
            parts = self.mesh.parts(axes)
            if index in indices and indices[index] < parts:
                raise PlanError(
                    f"{node.where()}: index `{index}` (size {indices[index]}) cannot be split in {parts} as the plan "
                    f"for `{pattern}` asks: {parts - indices[index]} parts would be empty. "
                    "Use fewer parts, or leave it whole."
                )
        return {index: axes for index, axes in wanted.items() if index in indices}
