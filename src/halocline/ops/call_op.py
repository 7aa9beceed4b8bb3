"""Calls a node's own ATen op on local tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import Node


def aten(target: str) -> Any:
    """The ATen overload named like `aten.conv2d.default`."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found


def call_op(node: Node, inputs: Sequence[Tensor], replaced: Mapping[str, Any] | None = None) -> Any:
    """What the node's op returns for `inputs`, with the arguments in `replaced` put in place of the node's."""
    arguments: dict[str, Any] = {**node.attrs, **(replaced or {})}
    for role, tensor in zip(node.roles, inputs, strict=True):
        name, _, number = role.partition(".")
        if number:
            arguments[name] = list(arguments[name])
            arguments[name][int(number)] = tensor
        else:
            arguments[name] = tensor
    return aten(node.target)(**arguments)
