"""`Graph`: the captured computation at global shapes, one node for each call of an op."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from .errors import CaptureError


@dataclass(frozen=True)
class TensorType:
    """Global shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def differentiable(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Origin:
    """Where a node comes from: the user's module path and the source line that called the op."""

    module: str = ""
    line: str = ""

    def __str__(self) -> str:
        return f"`{self.module or '(top)'}`" + (f" ({self.line})" if self.line else "")


@dataclass(frozen=True)
class Node:
    """One call of an op.

    `inputs` are the names of the values read, `roles` the op's argument that each fills (`input`, `weight`,
    `tensors.0` for an element of a list), `attrs` every other argument by name with defaults filled in.
    """

    name: str
    op: str
    target: str
    inputs: tuple[str, ...]
    roles: tuple[str, ...]
    attrs: Mapping[str, Any]
    input_types: tuple[TensorType, ...]
    type: TensorType
    origin: Origin = Origin()
    output: int | None = None  # which of the op's outputs this is, where it has several
    memo: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)  # what rules found out

    def __getitem__(self, attr: str) -> Any:
        return self.attrs[attr]

    def position(self, role: str) -> int | None:
        """At which position of `inputs` the argument `role` is, or None when it was not given."""
        return self.roles.index(role) if role in self.roles else None

    def where(self) -> str:
        """How errors name this node."""
        return f"{self.op} {self.origin}"

    def __str__(self) -> str:
        attrs = "".join(f", {key}={value}" for key, value in self.attrs.items() if value is not None)
        return f"{self.name}: {self.type} = {self.op}({', '.join(self.inputs)}{attrs})  # {self.origin.module}"


@dataclass(frozen=True)
class Graph:
    """Nodes in the order of execution.

    `inputs` maps the batch's tensors, in order, to their types; `parameters` and `buffers` map the names that values
    have in the graph to the names in the user's module; `constants` holds tensors that the model creates itself;
    `outputs` are value names; `updates` maps a buffer (graph name) to the value that replaces it after the forward.
    """

    nodes: tuple[Node, ...]
    inputs: Mapping[str, TensorType]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    outputs: tuple[str, ...]
    updates: Mapping[str, str]
    types: Mapping[str, TensorType]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises CaptureError if a node reads a value that is not there yet or with another type."""
        known = set(self.inputs) | set(self.parameters) | set(self.buffers) | set(self.constants)
        for node in self.nodes:
            for name, type in zip(node.inputs, node.input_types, strict=True):
                if name not in known:
                    raise CaptureError(f"{node.where()} reads `{name}`, which no earlier node makes")
                cast_leaf = name in self.replicated and self.types[name].shape == type.shape
                if self.types[name] != type and not cast_leaf:
                    raise CaptureError(f"{node.where()} reads `{name}` as {type}, but it is {self.types[name]}")
            if node.name in known:
                raise CaptureError(f"{node.where()}: the name `{node.name}` is taken")
            known.add(node.name)
        for name in (*self.outputs, *self.updates.values()):
            if name not in known:
                raise CaptureError(f"the graph returns `{name}`, which no node makes")

    @cached_property
    def replicated(self) -> frozenset[str]:
        """The values every rank holds whole from the start: parameters, buffers, constants."""
        return frozenset(self.parameters) | frozenset(self.buffers) | frozenset(self.constants)

    @cached_property
    def readers(self) -> Mapping[str, tuple[Node, ...]]:
        """For each value the nodes that read it, in order, once each."""
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                readers.setdefault(name, []).append(node)
        return {name: tuple(nodes) for name, nodes in readers.items()}

    def with_attr(self, op: str, attr: str, value: Any) -> "Graph":
        """The graph whose nodes of `op` have one attribute more."""
        nodes = (replace(node, attrs={**node.attrs, attr: value}) if node.op == op else node for node in self.nodes)
        return replace(self, nodes=tuple(nodes))

    def __str__(self) -> str:
        lines = [f"input {name}: {type}" for name, type in self.inputs.items()]
        lines += [f"parameter {name}: {self.types[name]} = {path}" for name, path in self.parameters.items()]
        lines += [f"buffer {name}: {self.types[name]} = {path}" for name, path in self.buffers.items()]
        lines += [str(node) for node in self.nodes]
        lines += [f"update {self.buffers[name]} = {value}" for name, value in self.updates.items()]
        return "\n".join([*lines, f"return {', '.join(self.outputs)}"])
