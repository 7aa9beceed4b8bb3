"""Calls of ATen ops: taken apart into tensors and attributes, and made again on local tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import Node, Origin, TensorType


def aten(target: str) -> Any:
    """The ATen overload named like `aten.conv2d.default`."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found


def bound(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults filled in."""
    names = target._schema.arguments
    given = {argument.name: value for argument, value in zip(names, args)} | dict(kwargs)
    return {argument.name: given.get(argument.name, argument.default_value) for argument in names}


def node_of(
    target: Any,
    arguments: Mapping[str, Any],
    value_of: Callable[[Any], tuple[str, TensorType] | None],
    name: str,
    type: TensorType,
    origin: Origin = Origin(),
    output: int | None = None,
) -> Node:
    """The node for a call of `target`; `value_of` gives the name and type of an argument that is a tensor."""
    values: list[tuple[str, str, TensorType]] = []
    attrs: dict[str, Any] = {}
    for key, argument in arguments.items():
        elements = list(argument) if isinstance(argument, (list, tuple)) else None
        if (found := value_of(argument)) is not None:
            values.append((key, *found))
        elif elements is None:
            attrs[key] = argument
        else:
            for number, element in enumerate(elements):
                if (found := value_of(element)) is not None:
                    values.append((f"{key}.{number}", *found))
                    elements[number] = None
            attrs[key] = tuple(elements)
    roles, inputs, types = zip(*values) if values else ((), (), ())
    op = target._schema.name.removeprefix("aten::")
    return Node(name, op, str(target), inputs, roles, attrs, types, type, origin, output)


def call_op(node: Node, inputs: Sequence[Tensor], replaced: Mapping[str, Any] | None = None) -> Any:
    """What the node's op returns for `inputs`, with the arguments in `replaced` put in place of the node's."""
    arguments: dict[str, Any] = {**node.attrs, **(replaced or {})}
    for role, tensor in zip(node.roles, inputs, strict=True):
        name, _, number = role.partition(".")
        if role == "num_batches_tracked":  # of a batch norm that is no argument: it stands for the momentum
            arguments["momentum"] = 1 / float(tensor)
        elif number:
            arguments[name] = list(arguments[name])
            arguments[name][int(number)] = tensor
        else:
            arguments[name] = tensor
    result = aten(node.target)(**arguments)
    return result if node.output is None else result[node.output]
