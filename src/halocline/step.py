"""`parallelize`: a model becomes a step that runs with every sample split over the ranks."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from .agreement import agree, fingerprint, together
from .byhand import plan_by_hand
from .capture import Loss, capture
from .comm.comm import Comm
from .comm.connect import connect
from .errors import SignatureError, StepError
from .exchange import Mover
from .graph import Graph
from .mesh import Mesh, prime_mesh
from .ops.rule import Noise
from .placement import Placement, Plan
from .program import Program, lower
from .region import Region
from .runtime import Runner, Tape
from .transfer import Transfer

MemoryFormat = Literal["auto", "channels_last", "preserve"]
PlanSpec = str | Mapping[str, str] | Plan
CACHED_PROGRAMS = 16


def parallelize(
    model: nn.Module,
    loss: Loss | None = None,
    batch: Sequence[Tensor] | None = None,
    plan: PlanSpec = "spatial",
    *,
    statistics: str = "global",
    memory_format: MemoryFormat = "auto",
    comm: Comm | None = None,
    mesh: Mesh | None = None,
    seed: int = 0,
) -> "Step":
    """The step that trains `model` with its samples split over all ranks, and gives the numbers of one process.

    `loss(model(*batch[:-1]), batch[-1])` must be a scalar; without `loss` the step returns the model's output.
    `batch` gives the global shapes and dtypes. `plan` is `"sample"`, `"spatial"`, `"n=2,h=2"`, a dict from patterns of
    module names to such phrases, or a `Plan`. `statistics` says over what batch norm takes its moments: `"global"` (the
    whole mini-batch, as one process does), `"spatial"` (the ranks that share samples), `"local"`. `memory_format` is
    that of activations with space: `"channels_last"`, `"preserve"` (what the model makes of the batch's), or `"auto"`:
    channels last where the net convolves in less than double precision. `comm` is found from how the process was
    started (mpiexec, torchrun, srun, alone) if not given. Every rank must hold the same weights.

    Raises CaptureError, PlanError, or SignatureError, on every rank, before any data moves.
    """
    step = Step(model, loss, plan, statistics, memory_format, comm or connect(), mesh, Noise(seed))
    if batch is not None:
        step.prepare(*batch)
    return step


class _Prepared:
    """A program for one signature, bound to this rank and to the model's tensors."""

    def __init__(
        self, graph: Graph, spec: pytree.TreeSpec, program: Program, runner: Runner, model: nn.Module, loss: Loss | None
    ) -> None:
        self.graph, self.spec, self.program, self.runner = graph, spec, program, runner
        rank, layouts = runner.comm.rank, program.placement.layouts
        self.regions = tuple(layouts[name].region(rank) for name in graph.inputs)
        self._owners = owners(graph, model, loss)

    def leaves(self) -> dict[str, Tensor]:
        """The model's parameters and buffers as they are now, and the constants."""
        return {name: getattr(*owner) for name, owner in self._owners.items()} | dict(self.graph.constants)

    def check(self, parts: Sequence[Tensor]) -> None:
        if len(parts) != len(self.regions):
            raise SignatureError(f"the step takes {len(self.regions)} tensors, as its batch has; it got {len(parts)}")
        for number, (part, region, type) in enumerate(zip(parts, self.regions, self.graph.inputs.values())):
            if tuple(part.shape) != region.shape or part.dtype != type.dtype:
                whole = tuple(part.shape) == type.shape
                raise SignatureError(
                    f"batch tensor {number} on rank {self.runner.comm.rank}: this rank's part is {region} of {type}, "
                    f"shape {region.shape}; it got {part.dtype} {tuple(part.shape)}"
                    + (", the whole tensor. Pass step.scatter(...) of it." if whole else ". See step.regions.")
                )


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


class _Run(torch.autograd.Function):
    """One pass through the program, as autograd sees it: the wanted leaves go in, the outputs come out."""

    @staticmethod
    def forward(ctx: Any, step: "Step", prepared: _Prepared, values: dict, names: list, *wanted: Tensor) -> Any:
        outputs, tape = prepared.runner.forward(values)
        ctx.step, ctx.prepared, ctx.tape, ctx.names = step, prepared, tape, names
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, None, None, *ctx.step._backward(ctx.prepared, ctx.tape, ctx.names, grads))


class Step(nn.Module):
    """A model that runs split over all ranks. Made by `parallelize`.

    `step(*parts)` takes this rank's part of every batch tensor (`step.regions`, or `step.scatter(*whole)`) and returns
    the global loss, the same on every rank; `backward()` leaves the global gradients on the model's parameters,
    complete and equal on all ranks. Parameters, `state_dict`, `train()` and `eval()` are the model's own.
    """

    def __init__(
        self, model: nn.Module, loss: Loss | None, plan: PlanSpec, statistics: str, memory_format: MemoryFormat,
        comm: Comm, mesh: Mesh | None, noise: Noise,
    ) -> None:  # fmt: skip
        super().__init__()
        if statistics not in ("global", "spatial", "local"):
            raise StepError(f'statistics="{statistics}": batch norm knows "global", "spatial" and "local"')
        self.model = model
        self.loss = loss
        self.comm, self.noise, self.statistics, self.memory_format = comm, noise, statistics, memory_format
        self._spec, self._mesh = plan, mesh or prime_mesh(comm.size)
        if self._mesh.size != comm.size:
            raise StepError(f"the mesh {self._mesh} has {self._mesh.size} ranks, but {comm.size} are running")
        self._programs: OrderedDict[Any, _Prepared] = OrderedDict()
        self._batch: tuple[tuple[tuple[int, ...], torch.dtype, str], ...] | None = None
        self._parameters_seen: list[tuple[str, nn.Parameter]] = []
        self._modules_seen: list[nn.Module] = []
        self._pending: dict[tuple[str, tuple[str, ...]], Tensor] = {}  # gradients not summed yet, by parameter path
        self._sums = True
        together(comm, "weights", lambda: agree(comm, {"model and weights": fingerprint(self._whole())}))

    def _whole(self) -> nn.Module:
        return nn.ModuleDict({"model": self.model} | ({"loss": self.loss} if isinstance(self.loss, nn.Module) else {}))

    # The model's own names: checkpoints and optimizers see no wrapper.
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.model.named_buffers(*args, **kwargs)

    @property
    def regions(self) -> tuple[Region, ...]:
        """The region of every batch tensor that this rank passes to the step. StepError before a batch is known."""
        return self._prepared().regions

    @property
    def program(self) -> Program:
        """The program of the current signature."""
        return self._prepared().program

    @property
    def plan(self) -> Plan:
        """The plan of the current signature."""
        return self.program.placement.plan

    def prepare(self, *batch: Tensor) -> None:
        """Plans for a batch of these global shapes and dtypes; the following calls of the step are of this batch."""
        self._batch = tuple((tuple(x.shape), x.dtype, str(x.device)) for x in batch)
        # Walking through a large model takes longer than a small step: done once for every batch that is announced.
        self._parameters_seen = list(self.model.named_parameters(remove_duplicate=False))
        self._modules_seen = list(self.model.modules())
        self._prepared()

    def scatter(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """This rank's part of every tensor of a whole batch; plans for its shapes if they are new."""
        self.prepare(*batch)
        return tuple(
            x[tuple(slice(*interval) for interval in region.intervals)] for x, region in zip(batch, self.regions)
        )

    def gather(self, output: Any) -> Any:
        """The whole of what the step returned in parts (the model's output), the same on every rank."""
        prepared = self._prepared()
        parts = pytree.tree_leaves(output)
        wholes = []
        for name, part in zip(prepared.graph.outputs, parts, strict=True):
            layout = prepared.program.placement.layouts[name]
            everything = (Region.whole(layout.shape),) * self.comm.size
            mover = Mover(Transfer(layout, everything, frozenset()), self.comm.rank)
            wholes.append(mover.finish(mover.start(part.detach(), self.comm)))
        return pytree.tree_unflatten(wholes, prepared.spec)

    def leaves(self) -> dict[str, Tensor]:
        """The model's parameters and buffers, by their names in the current program's graph."""
        return self._prepared().leaves()

    @torch.no_grad()
    def values_of(self, *parts: Tensor) -> dict[str, Tensor]:
        """This rank's part of every value of the graph, for looking at: one forward pass that frees nothing."""
        prepared = self._prepared()
        prepared.check(parts)
        _, tape = prepared.runner.forward(prepared.leaves() | dict(zip(prepared.graph.inputs, parts)), keep=True)
        return tape.values

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, `backward()` leaves out the sums over ranks; the next `backward()` outside makes up for them.

        Until then gradients that need a sum are held back, not in `.grad`.
        """
        self._sums, before = False, self._sums
        try:
            yield
        finally:
            self._sums = before

    def forward(self, *parts: Tensor) -> Any:
        """The global loss, or this rank's part of the model's output when there is no loss."""
        try:
            if self._batch is None or self.comm.size == 1:  # one rank's part is the whole
                self.prepare(*parts)
            prepared = self._prepared(tuple(x.requires_grad for x in parts))
            prepared.check(parts)
            self.noise.step += 1
            values = prepared.leaves() | dict(zip(prepared.graph.inputs, parts))
            names = sorted(name for name in values if name in prepared.program.differentiable)
            if names:
                outputs = _Run.apply(self, prepared, values, names, *(values[name] for name in names))
            else:
                outputs, _ = prepared.runner.forward(values)
        except Exception as error:
            self._fail(error)
            raise
        return outputs[0] if self.loss is not None else pytree.tree_unflatten(outputs, prepared.spec)

    def _fail(self, error: Exception) -> None:
        notes = " ".join(getattr(error, "__notes__", ()))
        self.comm.fail(f"{type(error).__name__}: {error} {notes}".strip())

    def _backward(
        self, prepared: _Prepared, tape: Tape, names: list[str], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        try:
            if tape.spent:
                raise StepError(
                    "backward was called a second time through the same step: what it needs was freed after the first. "
                    "Call the step again, or add the losses before one backward."
                )
            tape.spent = True
            paths = prepared.graph.parameters
            graph_names = {path: name for name, path in paths.items()}
            if self._sums and self._pending:
                tape.leaf_grads = {(graph_names[path], axes): grad for (path, axes), grad in self._pending.items()}
                self._pending = {}
            found = prepared.runner.backward(tape, grads, self._sums)
            for (name, axes), grad in tape.leaf_grads.items():
                key = (paths[name], axes)
                self._pending[key] = self._pending[key] + grad if key in self._pending else grad
            return [found.get(name) for name in names]
        except Exception as error:
            self._fail(error)
            raise

    def _prepared(self, inputs_want_grad: tuple[bool, ...] = ()) -> _Prepared:
        """The program for the current batch, training mode and wanted gradients, made when it is first met."""
        if self._batch is None:
            raise StepError("the step knows no batch yet: pass batch= to parallelize, or call step.prepare(*batch)")
        grad = torch.is_grad_enabled()
        wanted = tuple(name for name, p in self._parameters_seen if grad and p.requires_grad)
        modes = tuple(module.training for module in self._modules_seen)
        inputs_want_grad = tuple(grad and want for want in inputs_want_grad)
        key = (self._batch, wanted, modes, inputs_want_grad if any(inputs_want_grad) else ())
        if key not in self._programs:
            self._programs[key] = self._make(wanted, inputs_want_grad)
            if len(self._programs) > CACHED_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]

    def _make(self, wanted: tuple[str, ...], inputs_want_grad: tuple[bool, ...]) -> _Prepared:
        assert self._batch is not None
        like = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in self._batch]

        def made() -> tuple[Graph, pytree.TreeSpec, Program]:
            graph, spec = capture(self.model, self.loss, like)
            self._check_loss(graph)
            graph = graph.with_attr("batch_norm", "statistics", self.statistics)
            plan = self._spec if isinstance(self._spec, Plan) else self._by_hand(graph, self._spec)
            leaves = {name for name, path in graph.parameters.items() if path in wanted}
            leaves |= {name for name, path in graph.parameters.items() if path.startswith("loss.")} if wanted else set()
            leaves |= {name for name, want in zip(graph.inputs, inputs_want_grad) if want}
            return graph, spec, lower(Placement(graph, plan), frozenset(leaves))

        graph, spec, program = together(self.comm, "the model's capture or plan", made)
        agree(
            self.comm,
            {
                "the batch's shapes and dtypes": str(self._batch),
                "which parameters are trained": str(wanted),
                "the captured model (its code, or train/eval modes)": str(graph),
                "the plan": str(program.placement.plan),
            },
        )
        runner = Runner(program, self.comm, self.noise)
        return _Prepared(graph, spec, program, runner, self.model, self.loss)

    def _by_hand(self, graph: Graph, spec: str | Mapping[str, str]) -> Plan:
        fast = any(node.op in ("conv2d", "conv3d") and node.type.dtype.itemsize <= 4 for node in graph.nodes)
        auto: Literal["channels_last", "preserve"] = "channels_last" if fast else "preserve"
        plan = plan_by_hand(graph, self._mesh, spec)
        return replace(plan, memory_format=auto if self.memory_format == "auto" else self.memory_format)

    def _check_loss(self, graph: Graph) -> None:
        if self.loss is None:
            return
        types = [graph.types[name] for name in graph.outputs]
        if len(types) != 1 or types[0].numel != 1 or not types[0].differentiable:
            raise StepError(
                f"the loss must be one scalar of a floating-point dtype, but it is {', '.join(map(str, types))}; "
                "reduce it with a mean or a sum"
            )
