"""`Prepared`: a program bound to this rank and to the tensors of the user's model."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .capture import Loss
from .errors import SignatureError
from .exchange import channels_last
from .graph import Graph
from .program import Program, StartSum
from .runtime import Runner

Owed = tuple[str, tuple[str, ...]]  # a gradient that is to be summed: the parameter's path, and over which axes


class Prepared:
    """The program of one signature. `number` stands for the signature, and is the same on every rank."""

    def __init__(
        self, number: int, spec: pytree.TreeSpec, program: Program, runner: Runner, model: nn.Module, loss: Loss | None
    ) -> None:
        self.number, self.spec, self.program, self.runner = number, spec, program, runner
        self.graph = program.graph
        rank, layouts = runner.comm.rank, program.placement.layouts
        self.regions = tuple(layouts[name].region(rank) for name in self.graph.inputs)
        sums = (step.bucket for step in program.backward if isinstance(step, StartSum))
        paths = self.graph.parameters
        self.summed: frozenset[Owed] = frozenset((paths[leaf], sum.axes) for sum in sums for leaf in sum.leaves)
        self._owners = owners(self.graph, model, loss)
        if program.placement.plan.memory_format == "channels_last":
            # Strides only, the values stay: else every convolution of every step would turn its weight around.
            for name in self.graph.parameters:
                parameter = getattr(*self._owners[name])
                parameter.data = channels_last(parameter.data)

    def leaves(self) -> dict[str, Tensor]:
        """The model's parameters and buffers as they are now, and the constants."""
        return {name: getattr(*owner) for name, owner in self._owners.items()} | dict(self.graph.constants)

    def misfit(self, parts: Sequence[Tensor]) -> str | None:
        """Why `parts` are not this rank's part of a batch, or None when they are."""
        if len(parts) != len(self.regions):
            return f"the step takes {len(self.regions)} tensors, as its batch has; it got {len(parts)}"
        for number, (part, region, type) in enumerate(zip(parts, self.regions, self.graph.inputs.values())):
            if part.is_meta:
                return f"batch tensor {number} is on the meta device, so it has no values; pass one that has"
            if tuple(part.shape) != region.shape or part.dtype != type.dtype:
                whole = tuple(part.shape) == type.shape
                return (
                    f"batch tensor {number} on rank {self.runner.comm.rank}: this rank's part is {region} of {type}, "
                    f"shape {region.shape}; it got {part.dtype} {tuple(part.shape)}"
                    + (", the whole tensor. Pass step.scatter(...) of it." if whole else ". See step.regions.")
                )
        return None

    def check(self, parts: Sequence[Tensor]) -> None:
        """Raises SignatureError when `parts` are not this rank's part of a batch."""
        if problem := self.misfit(parts):
            raise SignatureError(problem)


def owners(graph: Graph, model: nn.Module, loss: Loss | None) -> dict[str, tuple[nn.Module, str]]:
    """For each parameter and buffer of the graph the module that holds it, and its name there."""
    found = {}
    for name, path in (*graph.parameters.items(), *graph.buffers.items()):
        prefix, _, attribute = path.rpartition(".")
        if isinstance(loss, nn.Module) and (prefix + ".").startswith("loss.") and not hasattr(model, "loss"):
            found[name] = loss.get_submodule(prefix.removeprefix("loss").lstrip(".")), attribute
        else:
            found[name] = model.get_submodule(prefix), attribute
    return found


def leaves_of(graph: Graph, model: nn.Module, loss: Loss | None) -> dict[str, Tensor]:
    """The tensors of `model` and `loss` that the graph names, and its constants."""
    return {name: getattr(*owner) for name, owner in owners(graph, model, loss).items()} | dict(graph.constants)
