"""`Plan`: for each node the split of its index space; `Placement`: the regions that follow from it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from .errors import PlanError
from .graph import Graph, Node
from .layout import DimSplit, Layout, even
from .mesh import Mesh
from .ops import rule_for
from .ops.rule import At
from .region import Region

Split = Mapping[str, tuple[str, ...]]  # an index of a node -> the mesh axes that split it


@dataclass(frozen=True)
class Plan:
    """For each node (by name) the split of its index space, and for each batch tensor the axes that split its dims.

    Nodes and indices not named are not split: every rank computes them whole.
    """

    mesh: Mesh
    splits: Mapping[str, Split]
    inputs: Mapping[str, Mapping[int, tuple[str, ...]]]
    origin: str = "by hand"
    memory_format: Literal["preserve", "channels_last"] = "preserve"  # of activations with space
    made_for: str = ""  # what the graph it was made for looks like; empty: any graph with these names
    seconds: float | None = None  # of a step, as predicted
    memory_bytes: int | None = None  # of the fullest rank, as predicted
    division: Literal["balanced", "chunk"] = "balanced"  # how an extent is cut that the parts do not divide
    recompute: tuple[tuple[str, ...], ...] = ()  # segments of nodes that forget what they made until the backward pass

    def to_json(self) -> str:
        document = {
            "halocline_plan": 1,
            "origin": self.origin,
            "memory_format": self.memory_format,
            "made_for": self.made_for,
            "predicted_seconds": self.seconds,
            "predicted_memory_bytes": self.memory_bytes,
            "mesh": [list(axis) for axis in self.mesh.axes],
            "inputs": {
                name: {str(dim): list(axes) for dim, axes in dims.items()} for name, dims in self.inputs.items()
            },
            "division": self.division,
            "recompute": [list(names) for names in self.recompute],
            "splits": {
                name: {index: list(axes) for index, axes in split.items()} for name, split in self.splits.items()
            },
        }
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Raises PlanError for a text that is not a plan, naming what is wrong with it."""
        try:
            document: Any = json.loads(text)
            if document["halocline_plan"] != 1:
                raise PlanError(f"plan file: version {document['halocline_plan']} is not known; this release reads 1")
            return cls(
                Mesh(tuple((str(name), int(size)) for name, size in document["mesh"])),
                {name: {i: tuple(axes) for i, axes in split.items()} for name, split in document["splits"].items()},
                {name: {int(d): tuple(axes) for d, axes in dims.items()} for name, dims in document["inputs"].items()},
                str(document["origin"]),
                _one_of(("preserve", "channels_last"), document, "memory_format"),
                str(document.get("made_for", "")),
                _number(document, "predicted_seconds"),
                _number(document, "predicted_memory_bytes"),
                _one_of(("balanced", "chunk"), document, "division"),
                tuple(tuple(map(str, names)) for names in document.get("recompute", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise PlanError(f"plan file: not a halocline plan ({type(error).__name__}: {error})") from error

    def __str__(self) -> str:
        def show(items: Mapping[Any, tuple[str, ...]]) -> str:
            return " ".join(f"{key}/{'*'.join(axes)}" for key, axes in items.items()) or "whole"

        lines = [f"mesh {self.mesh} ({self.origin})"]
        lines += [f"input {name}: {show(dims)}" for name, dims in self.inputs.items()]
        lines += [f"recompute: {' '.join(names)}" for names in self.recompute]
        return "\n".join(lines + [f"{name}: {show(split)}" for name, split in self.splits.items()])


def _one_of(known: tuple[str, ...], document: Mapping[str, Any], key: str) -> Any:
    """The value of `key`, by default the first that is `known`."""
    if (found := document.get(key, known[0])) not in known:
        raise ValueError(f"{key} is {found!r}, not one of {', '.join(known)}")
    return found


def _number(document: Mapping[str, Any], key: str) -> Any:
    found = document.get(key)
    if found is not None and not isinstance(found, int | float):
        raise ValueError(f"{key} is {found!r}, not a number")
    return found


@dataclass(frozen=True)
class Placement:
    """A graph under a plan: for each node the parts of its indices, for each value the layout.

    Raises PlanError when the plan was made for another graph, or splits what cannot be split.
    """

    graph: Graph
    plan: Plan

    def __post_init__(self) -> None:
        names = {node.name for node in self.graph.nodes}
        # A node that is not split need not be here: in evaluation mode batch norm counts no batches.
        strangers = [name for name, split in self.plan.splits.items() if any(split.values()) and name not in names]
        strangers += [name for name in self.plan.inputs if name not in self.graph.inputs]
        if strangers:
            raise PlanError(
                f"the plan was made for another model or batch: it names `{strangers[0]}`, which is not here"
            )
        for name, dims in self.plan.inputs.items():
            for dim, axes in dims.items():
                if not 0 <= dim < len(self.graph.inputs[name].shape) or not set(axes) <= set(self.mesh.names):
                    raise PlanError(
                        f"the plan splits dim {dim} of `{name}` over {', '.join(axes)}, but `{name}` is "
                        f"{self.graph.inputs[name]} and the mesh {self.mesh}"
                    )
        _ = self.layouts

    @property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    @cached_property
    def parts(self) -> Mapping[str, Mapping[str, DimSplit]]:
        """For each node the parts of every index that is split."""
        return self._resolved[0]

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """For each value what every rank owns."""
        return self._resolved[1]

    @cached_property
    def _resolved(self) -> tuple[dict[str, dict[str, DimSplit]], dict[str, Layout]]:
        graph, mesh = self.graph, self.mesh
        layouts = {name: Layout.split(mesh, graph.types[name].shape, {}) for name in graph.replicated}
        for name, type in graph.inputs.items():
            layouts[name] = Layout.split(mesh, type.shape, self.plan.inputs.get(name, {}), self.plan.division)
        parts: dict[str, dict[str, DimSplit]] = {}
        whole = set(graph.updates.values())  # every rank keeps the whole of every buffer
        for node in graph.nodes:
            split = {} if node.name in whole else self.plan.splits.get(node.name, {})
            parts[node.name] = index_parts(
                mesh, node, split, [layouts[name] for name in node.inputs], self.plan.division
            )
            layouts[node.name] = output_layout(mesh, node, parts[node.name])
        return parts, layouts

    def at(self, node: Node, rank: int) -> At:
        """The box of `node`'s index space that `rank` computes."""
        return box(node, {i: dim.parts[self.mesh.part(rank, dim.axes)] for i, dim in self.parts[node.name].items()})

    def over(self, node: Node) -> frozenset[str]:
        """The mesh axes along which ranks compute different parts of `node`."""
        return frozenset(axis for dim in self.parts[node.name].values() for axis in dim.axes)

    def reads(self, node: Node, rank: int) -> tuple[Region, ...]:
        return rule_for(node).reads(node, self.at(node, rank))


def box(node: Node, at: At) -> At:
    """`at` with every index it leaves out taken whole."""
    return {i: at.get(i, (0, size)) for i, size in rule_for(node).signature(node).indices.items()}


def index_parts(
    mesh: Mesh, node: Node, split: Split, inputs: list[Layout], division: str = "balanced"
) -> dict[str, DimSplit]:
    """The parts of each split index: those of an input dim that it runs along one to one, else by `division`."""
    signature = rule_for(node).signature(node)
    parts = {}
    for index, axes in split.items():
        if not axes:
            continue
        if index not in signature.indices:
            known = ", ".join(signature.indices) or "none"
            raise PlanError(f"{node.where()}: there is no index `{index}` that can be split (there are: {known})")
        if unknown := [axis for axis in axes if axis not in mesh.names]:
            raise PlanError(f"{node.where()}: index `{index}` is split over `{unknown[0]}`, but the mesh is {mesh}")
        size = signature.indices[index]
        parts[index] = even(mesh, axes, size, division)
        for layout, dims in zip(inputs, signature.inputs):
            for dim, name in zip(layout.dims, dims):
                if name == index and dim.axes == axes and dim.size == size:
                    parts[index] = dim
    return parts


def output_layout(mesh: Mesh, node: Node, parts: Mapping[str, DimSplit]) -> Layout:
    """Who owns which part of the node's output, read off the rule's `writes`."""
    rule = rule_for(node)
    dims = []
    for dim, (size, index) in enumerate(zip(node.type.shape, rule.signature(node).output)):
        if index is None or index not in parts:
            dims.append(DimSplit((), ((0, size),)))
        else:
            cuts = [rule.writes(node, box(node, {index: part})).intervals[dim] for part in parts[index].parts]
            dims.append(DimSplit(parts[index].axes, tuple(cuts)))
    return Layout(mesh, tuple(dims))
