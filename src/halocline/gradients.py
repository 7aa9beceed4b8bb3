"""Which values of a graph carry a gradient or depend on the batch, and which nodes run together."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .graph import Graph, Node
from .ops import rule_for


def trained(graph: Graph) -> frozenset[str]:
    """The parameters that can have a gradient."""
    return frozenset(name for name in graph.parameters if graph.types[name].differentiable)


def carrying(graph: Graph, wanted: Collection[str]) -> frozenset[str]:
    """The values that depend on a leaf in `wanted` and on which an output depends, and which so carry a gradient."""
    depends = set(wanted)
    for node in graph.nodes:
        carries = node.type.differentiable and node.op != "detach"
        if carries and any(name in depends for name in node.inputs):
            depends.add(node.name)
    used = set(graph.outputs)
    for node in reversed(graph.nodes):
        if node.name in used and node.name in depends:
            used.update(name for name in node.inputs if name in depends)
    return frozenset(depends & used)


def varying(graph: Graph) -> frozenset[str]:
    """The values that depend on the batch. All others every rank computes whole."""
    found = set(graph.inputs)
    for node in graph.nodes:
        if any(name in found for name in node.inputs):
            found.add(node.name)
    return frozenset(found)


def wanted_inputs(node: Node, carried: Collection[str]) -> tuple[bool, ...]:
    """Which inputs of `node` its backward pass must give a gradient for."""
    return tuple(name in carried and node.name in carried for name in node.inputs)


def overwriting(graph: Graph) -> frozenset[str]:
    """The nodes that put their output in place of their first input if that is not fetched."""
    made = {node.name: node for node in graph.nodes}
    returned = {*graph.outputs, *graph.updates.values()}
    return frozenset(
        node.name
        for node in graph.nodes
        if rule_for(node).overwrites
        and (value := node.inputs[0]) in made
        and rule_for(made[value]).fresh
        and graph.readers[value] == (node,)
        and value not in returned
        and graph.types[value] == node.type
    )


@dataclass(frozen=True)
class Manner:
    """How a node runs beside its neighbours: in place of its input, with the op that follows, within the one before."""

    overwrite: bool = False
    then: str = ""
    absorbed: bool = False


ALONE = Manner()


def manners(graph: Graph, overwrite: Collection[str] | None = None) -> Mapping[str, Manner]:
    """How each node runs, given those that `overwrite` their first input (default: all that may).

    A node whose rule `absorbs` the op that overwrites its output applies that op too: memory is read once for both.
    """
    overwrite = overwriting(graph) if overwrite is None else overwrite
    made = {node.name: node for node in graph.nodes}
    absorbed = {
        node.inputs[0]: node
        for node in graph.nodes
        if node.name in overwrite and node.op in rule_for(made[node.inputs[0]]).absorbs
    }
    within = {node.name for node in absorbed.values()}
    return {
        name: Manner(name in overwrite, absorbed[name].op if name in absorbed else "", name in within) for name in made
    }
