"""One call of an op under a split that a test chooses, held to the contract of `tests.contract`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from halocline.graph import Graph, Node, TensorType
from halocline.lowering import lower
from halocline.mesh import Mesh
from halocline.ops import rule_for
from halocline.ops.call_op import bound, node_of
from halocline.ops.rule import Example
from halocline.placement import Placement, Plan
from halocline.region import Interval, Region
from tests.contract import Config, check


def node_for(target: Any, *args: Any, output: int | None = None, **kwargs: Any) -> tuple[Node, dict[str, Tensor]]:
    """The node of a call, and its tensors by the names that the node gives them."""
    values: dict[str, Tensor] = {}

    def value_of(argument: Any) -> tuple[str, TensorType] | None:
        if not isinstance(argument, Tensor):
            return None
        name = next((name for name, value in values.items() if value is argument), f"x{len(values)}")
        values[name] = argument
        return name, TensorType(tuple(argument.shape), argument.dtype)

    result = target(*args, **kwargs)
    result = result if output is None else result[output]
    type = TensorType(tuple(result.shape), result.dtype)
    return node_of(target, bound(target, args, kwargs), value_of, "y", type, output=output), values


def check_split(
    target: Any,
    *args: Any,
    split: Mapping[str, int],
    whole: tuple[str, ...] = (),
    output: int | None = None,
    **kwargs: Any,
) -> None:
    """Checks output and gradients on as many ranks as `split` gives to the indices; tensors `whole` are replicated."""
    node, values = node_for(target, *args, output=output, **kwargs)
    types = {name: TensorType(tuple(value.shape), value.dtype) for name, value in values.items()}
    replicated = {name for name, role in zip(node.inputs, node.roles) if role in whole}
    inputs = {name: type for name, type in types.items() if name not in replicated}
    parameters = {name: name for name in replicated}
    graph = Graph((node,), inputs, parameters, {}, ("y",), {}, {"y": node.type, **types})
    mesh = Mesh(tuple((f"axis_{index}", parts) for index, parts in split.items()))
    plan = Plan(mesh, {"y": {index: (f"axis_{index}",) for index in split}}, {})
    wanted = frozenset(name for name, value in values.items() if value.is_floating_point())
    expected = target(*args, **kwargs)
    expected = expected if output is None else expected[output]
    check(Config(Example(target, args, kwargs), values, {}, lower(Placement(graph, plan), wanted), expected))


def reads(node: Node, **at: Interval) -> tuple[Region, ...]:
    """What the box `at` of the node's index space reads; indices left out are whole."""
    rule = rule_for(node)
    return rule.reads(node, {index: at.get(index, (0, size)) for index, size in rule.signature(node).indices.items()})
