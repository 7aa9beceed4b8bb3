"""What `torch.export` cannot follow as it is, said in another way while it traces."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .graph import Graph

CUMULATIVE = -1.0  # in place of a momentum: the running statistics are the mean over all batches so far


class DataIsDetached(TorchFunctionMode):
    """`x.data`, which leaves the trace, is read as `x.detach()`, which has the same value and as little a gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        return func(*args, **(kwargs or {}))


@contextmanager
def numbered_momentum(model: nn.Module) -> Iterator[None]:
    """Batch norms with `momentum=None` have the momentum `CUMULATIVE`: they would read a counter's value to find it."""
    found = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None
    ]
    try:
        for module in found:
            module.momentum = CUMULATIVE
        yield
    finally:
        for module in found:
            module.momentum = None


def with_counters(graph: Graph) -> Graph:
    """The graph whose batch norms of momentum `CUMULATIVE` read the number of batches, this one included."""
    counters = {path: name for name, path in graph.buffers.items()}
    nodes = []
    for node in graph.nodes:
        place = node.position("running_mean")
        if node.op == "batch_norm" and node["momentum"] == CUMULATIVE and node["training"] and place is not None:
            mean = graph.buffers[node.inputs[place]]
            counter = counters[mean.removesuffix("running_mean") + "num_batches_tracked"]
            value = graph.updates[counter]
            node = replace(
                node,
                inputs=(*node.inputs, value),
                roles=(*node.roles, "num_batches_tracked"),
                input_types=(*node.input_types, graph.types[value]),
            )
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


@dataclass(frozen=True)
class Constant:
    """Stands in a structure for something that is no tensor, such as None."""

    value: Any


pytree.register_pytree_node(Constant, lambda constant: ([], constant.value), lambda _, value: value)


def structure(exported: ExportedProgram) -> pytree.TreeSpec | None:
    """The structure of the model's output, with tensors as leaves; what else it returns, such as None, is in there."""
    spec = exported.call_spec.out_spec
    if spec is None:
        return None
    returned = [out.arg for out in exported.graph_signature.output_specs if out.kind == OutputKind.USER_OUTPUT]
    leaves = [Constant(arg.value) if isinstance(arg, ConstantArgument) else 0 for arg in returned]
    return pytree.tree_structure(pytree.tree_unflatten(leaves, spec))


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors of an output, in the order of its structure."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
