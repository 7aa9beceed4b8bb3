"""`parallelize`: a model becomes a step that runs with every sample split over the ranks."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .agreement import agree, digest, everywhere, fingerprint, together
from .auto import plan_auto
from .autocast import Autocast, ambient
from .byhand import plan_by_hand
from .capture import Loss, capture, on_device_of
from .code_state import CodeState, CodeWatch
from .comm.comm import Comm
from .comm.connect import connect
from .errors import PlanError, StepError
from .exchange import Mover, channels_last
from .graph import Graph, TensorType
from .lowering import lower
from .mesh import Mesh, prime_mesh
from .notice import notice
from .ops.rule import Noise
from .placement import Placement, Plan
from .prepared import Owed, Prepared
from .program import Program
from .recompute import segments, with_recomputation
from .region import DIVISIONS, Region
from .runtime import Runner, Tape
from .tracing import tensors_in
from .transfer import Transfer

Division = Literal["balanced", "chunk"]
MemoryFormat = Literal["auto", "channels_last", "preserve"]
PlanSpec = str | Mapping[str, str] | Plan
Batch = tuple[tuple[tuple[int, ...], torch.dtype, str], ...]  # shape, dtype and device of each tensor
Names = tuple[str, ...]
Flags = tuple[bool, ...]
Key = tuple[Batch, Names, Flags, Flags, tuple[Autocast, ...], CodeState]
CACHED_PROGRAMS = 16
ACTION = "what they do next"


def parallelize(
    model: nn.Module,
    loss: Loss | None = None,
    batch: Sequence[Tensor] | None = None,
    plan: PlanSpec = "auto",
    *,
    statistics: str = "global",
    memory_format: MemoryFormat = "auto",
    comm: Comm | None = None,
    mesh: Mesh | None = None,
    seed: int = 0,
    recompute: Sequence[str] = (),
    division: Division = "balanced",
) -> "Step":
    """The step that trains `model` with its samples split over all ranks, and gives the numbers of one process.

    `loss(model(*batch[:-1]), batch[-1])` must be a scalar; without `loss` the step returns the model's output.
    `batch` gives the global shapes and dtypes (it may be on the meta device). `plan` is `"auto"` (the best by the
    performance model of this host, found on rank 0), `"sample"`, `"spatial"`, `"n=2,h=2"`, a dict from patterns of
    module names to such phrases, or a `Plan`. `statistics` says over what batch norm takes its moments: `"global"` (the
    whole mini-batch, as one process does), `"spatial"` (the ranks that share samples), `"local"`. `memory_format` is
    that of activations with space: `"channels_last"`, `"preserve"` (what the model makes of the batch's), or `"auto"`:
    channels last where the net convolves in less than double precision. `comm` is found from how the process was
    started (mpiexec, torchrun, srun, alone) if not given. Every rank must hold the same weights. `recompute` names
    modules by pattern (`"down.*"`) that forget what they made until the backward pass, and make it again: less memory
    for more time, and the same numbers. `division` says how an extent is cut that its parts do not divide:
    `"balanced"`, or `"chunk"`, as `torch.chunk` does.

    Raises CaptureError, PlanError, or SignatureError, on every rank, before any data moves.
    """
    step = Step(model, loss, plan, statistics, memory_format, comm or connect(), mesh, Noise(seed), tuple(recompute),
                division)  # fmt: skip
    if batch is not None:
        step.prepare(*batch)
    return step


class _Run(torch.autograd.Function):
    """One pass through the program, as autograd sees it: the wanted leaves go in, the outputs come out."""

    @staticmethod
    def forward(ctx: Any, step: "Step", prepared: Prepared, values: dict, names: list, *wanted: Tensor) -> Any:
        outputs, tape = prepared.runner.forward(values)
        ctx.step, ctx.prepared, ctx.tape, ctx.names = step, prepared, tape, names
        loose = (x for x, name in zip(outputs, prepared.graph.outputs) if name not in prepared.program.differentiable)
        ctx.mark_non_differentiable(*loose)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
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
        comm: Comm, mesh: Mesh | None, noise: Noise, recompute: tuple[str, ...] = (),
        division: Division = "balanced",
    ) -> None:  # fmt: skip
        super().__init__()
        # `torch.compile(step)` runs the step as it is: it cannot see into the communication.
        if not hasattr(Step.forward, "_torchdynamo_disable"):
            Step.forward = torch.compiler.disable(Step.forward)  # type: ignore[method-assign]
        if statistics not in ("global", "spatial", "local"):
            raise StepError(f'statistics="{statistics}": batch norm knows "global", "spatial" and "local"')
        self.model = model
        self.loss = loss
        self.comm, self.noise, self.statistics, self.memory_format = comm, noise, statistics, memory_format
        if division not in DIVISIONS:
            raise StepError(f'division="{division}": an extent is divided "balanced" or as "chunk" does')
        self._spec, self._mesh = plan, mesh or prime_mesh(comm.size)
        self._recompute, self._division = recompute, division
        if self._mesh.size != comm.size:
            raise StepError(f"the mesh {self._mesh} has {self._mesh.size} ranks, but {comm.size} are running")
        self._programs: OrderedDict[Any, Prepared] = OrderedDict()
        self._batch: Batch | None = None
        self._code = CodeWatch(self._whole())
        self._owed: set[Owed] = set()  # which gradients no_sync holds back, the same on every rank
        self._pending: dict[Owed, Tensor] = {}  # this rank's part of them, where it has one
        self._sums = True
        together(comm, "weights", lambda: agree(comm, {"model and weights": fingerprint(self._whole())}))

    def __deepcopy__(self, memo: Any) -> "Step":
        raise StepError(
            "a step cannot be copied: it holds the connections to the other ranks. Copy its model, `step.model`, and "
            "parallelize the copy if it is to run split too."
        )

    def _whole(self) -> nn.Module:
        return nn.ModuleDict({"model": self.model} | ({"loss": self.loss} if isinstance(self.loss, nn.Module) else {}))

    # The model's own names: checkpoints and optimizers see no wrapper.
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, in the usual memory order: a program may have put channels last, which safetensors refuses."""
        state = self.model.state_dict(*args, **kwargs)
        for name, value in state.items():
            if isinstance(value, Tensor) and not value.is_contiguous():
                state[name] = value.contiguous()
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.model.named_buffers(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; what `no_sync` holds back is dropped too."""
        self._pending, self._owed = {}, set()
        self.model.zero_grad(set_to_none)

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
        before, self._batch = self._batch, _like(on_device_of(self.model, batch))
        try:
            self._agreed()
        except Exception:
            self._batch = before
            raise

    def scatter(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """This rank's part of every tensor of a whole batch; plans for its shapes if they are new."""
        self.prepare(*batch)
        parts = (x[tuple(slice(*interval) for interval in region.intervals)] for x, region in zip(batch, self.regions))
        # In the memory format that the program wants, so that it need not keep a second copy.
        return tuple(channels_last(part) if self.plan.memory_format == "channels_last" else part for part in parts)

    def gather(self, output: Any) -> Any:
        """The whole of what the step returned in parts (the model's output), the same on every rank."""
        prepared = self._prepared()
        parts = tensors_in(output)
        wholes = []
        for name, part in zip(prepared.graph.outputs, parts, strict=True):
            layout = prepared.program.placement.layouts[name]
            everything = (Region.whole(layout.shape),) * self.comm.size
            mover = Mover(Transfer(layout, everything, frozenset()), self.comm.rank)
            wholes.append(mover.finish(mover.start(part.detach(), self.comm)))
        return pytree.tree_unflatten(wholes, prepared.spec)

    @property
    def runner(self) -> Runner:
        """What runs the current program on this rank."""
        return self._prepared().runner

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
        if self._batch is None or self.comm.size == 1:  # one rank's part is the whole
            self.prepare(*parts)
        prepared = self._agreed(parts)
        try:
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
        """Tells the other ranks of an error that only this one may have."""
        notes = " ".join(getattr(error, "__notes__", ()))
        self.comm.fail(f"{type(error).__name__}: {error} {notes}".strip())

    def _backward(
        self, prepared: Prepared, tape: Tape, names: list[str], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        self._agree_on_backward(tape)
        try:
            if torch.is_grad_enabled():
                raise StepError(
                    "backward was called with create_graph=True, but a step is not twice differentiable: its gradients "
                    "have no gradients. Compute such a term (a gradient penalty) in one process, outside the step."
                )
            if tape.spent:
                raise StepError(
                    "backward was called a second time through the same step: what it needs was freed after the first. "
                    "Call the step again, or add the losses before one backward."
                )
            tape.spent = True
            paths = prepared.graph.parameters
            if not self._sums:
                self._owed |= prepared.summed
            elif self._owed:
                self._check_owed(prepared.summed)
                graph_names = {path: name for name, path in paths.items()}
                tape.leaf_grads = {(graph_names[path], axes): grad for (path, axes), grad in self._pending.items()}
                self._pending, self._owed = {}, set()
            found = prepared.runner.backward(tape, grads, self._sums)
            for (name, axes), grad in tape.leaf_grads.items():
                key = (paths[name], axes)
                self._pending[key] = self._pending[key] + grad if key in self._pending else grad
            return [found.pop(name, None) for name in names]  # taken out, so that autograd need not copy them
        except Exception as error:
            self._fail(error)
            raise

    def _agree_on_backward(self, tape: Tape) -> None:
        """Raises SignatureError on every rank unless all go back through the same step."""
        if not everywhere(self.comm, -2 - 2 * tape.number - self._sums):
            how = "" if self._sums else " without sums (no_sync)"
            agree(self.comm, {ACTION: f"the backward pass of step {tape.number}{how}"})

    def _check_owed(self, summed: frozenset[Owed]) -> None:
        if missing := sorted(self._owed - summed):
            raise StepError(
                f"no_sync held back gradients of {len(missing)} parameters (`{missing[0][0]}`, ...) that this backward "
                "does not sum over the ranks: its batch is split otherwise. Accumulate over batches of one shape."
            )

    def _agreed(self, parts: Sequence[Tensor] | None = None) -> Prepared:
        """The program of what every rank is about to do; raises on every rank where that is not the same everywhere.

        Where a rank's `parts` of the batch are not what the program takes, every rank raises SignatureError too.
        """
        key = self._key(tuple(x.requires_grad for x in parts or ()))
        known = self._programs.get(key)
        fits = known is None or parts is None or known.misfit(parts) is None
        agreed = everywhere(self.comm, (known.number if known else digest(key)) if fits else -1)
        if not agreed:
            agree(self.comm, self._facts(*key))
        prepared = self._prepared(key)
        if parts is not None and (known is None or not agreed or not fits):
            together(self.comm, "its part of the batch", lambda: prepared.check(parts))
        return prepared

    def _key(self, inputs_want_grad: tuple[bool, ...] = ()) -> Key:
        """What a program is made for: the batch, the parameters that are trained, each module's mode, the inputs."""
        if self._batch is None:
            raise StepError("the step knows no batch yet: pass batch= to parallelize, or call step.prepare(*batch)")
        grad = torch.is_grad_enabled()
        code = self._code.now()
        wanted = tuple(name for name, p in self._code.parameters if grad and p.requires_grad)
        modes = tuple(module.training for _, module in self._code.modules)
        devices = dict.fromkeys(torch.device(device).type for _, _, device in self._batch)
        autocast = tuple(state for device in devices if (state := ambient(device)).enabled)
        inputs_want_grad = inputs_want_grad if grad and any(inputs_want_grad) else ()
        return self._batch, wanted, modes, inputs_want_grad, autocast, code

    def _facts(
        self, batch: Batch, wanted: Names, modes: Flags, inputs_want_grad: Flags, autocast: tuple[Autocast, ...],
        code: CodeState,
    ) -> dict[str, str]:  # fmt: skip
        """A key in words."""
        names = [name.removeprefix("model").removeprefix(".") for name, _ in self._code.modules]
        return {
            ACTION: "a forward pass",
            "the batch's shapes and dtypes": "\n".join(
                f"tensor {number}: {TensorType(shape, dtype)} on {device}"
                for number, (shape, dtype, device) in enumerate(batch)
            ),
            "which parameters are trained": "\n".join(wanted) or "none (no gradients)",
            "train/eval modes": "\n".join(f"{name or 'model'}.training = {mode}" for name, mode in zip(names, modes)),
            "which inputs want a gradient": str(inputs_want_grad),
            "autocast": ", ".join(map(str, autocast)) or "no autocast",
            "attributes, methods and hooks of the model": repr(code),
        }

    def _prepared(self, key: Key | None = None) -> Prepared:
        """The program for `key` (by default: for what the step is set to do), made when it is first met."""
        key = key or self._key()
        if key not in self._programs:
            self._programs[key] = self._make(key)
            if len(self._programs) > CACHED_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]

    def _make(self, key: Key) -> Prepared:
        batch, wanted, _, inputs_want_grad, *_ = key
        like = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in batch]

        def captured() -> tuple[Graph, pytree.TreeSpec]:
            graph, spec = capture(self.model, self.loss, like)
            self._check_loss(graph, spec)
            return graph.with_attr("batch_norm", "statistics", self.statistics), spec

        def lowered() -> Program:
            plan = found or (self._spec if isinstance(self._spec, Plan) else self._by_hand(graph, self._spec))
            if self.memory_format != "auto":
                plan = replace(plan, memory_format=self.memory_format)
            if plan.mesh.size != self.comm.size:
                raise PlanError(
                    f"the plan was made for {plan.mesh.size} ranks (mesh {plan.mesh}), but {self.comm.size} are running"
                )
            leaves = {name for name, path in graph.parameters.items() if path in wanted}
            leaves |= {name for name, path in graph.parameters.items() if path.startswith("loss.")} if wanted else set()
            leaves |= {name for name, want in zip(graph.inputs, inputs_want_grad) if want}
            if self._division != "balanced":
                plan = replace(plan, division=self._division)
            if self._recompute:
                plan = replace(plan, recompute=segments(graph, self._recompute))
            return with_recomputation(lower(Placement(graph, plan), frozenset(leaves)))

        graph, spec = together(self.comm, "the model's capture", captured)
        found = plan_auto(graph, self.comm, self._mesh) if self._spec == "auto" else None
        program = together(self.comm, "its plan", lowered)
        placement = program.placement
        agree(
            self.comm,
            {"the captured model (its code)": str(placement.graph), "the plan": str(placement.plan)},
        )
        if self.comm.rank == 0:
            notice(placement)
        runner = Runner(program, self.comm, self.noise)
        return Prepared(digest(key), spec, program, runner, self.model, self.loss)

    def _by_hand(self, graph: Graph, spec: str | Mapping[str, str]) -> Plan:
        fast = any(node.op in ("conv2d", "conv3d") and node.type.dtype.itemsize <= 4 for node in graph.nodes)
        plan = plan_by_hand(graph, self._mesh, spec)
        return replace(plan, memory_format="channels_last" if fast else "preserve")

    def _check_loss(self, graph: Graph, spec: pytree.TreeSpec) -> None:
        if self.loss is None:
            return
        types = [graph.types[name] for name in graph.outputs]
        if not spec.is_leaf() or types[0].numel != 1 or not types[0].differentiable:
            raise StepError(
                f"the loss must be one scalar of a floating-point dtype, but it is {', '.join(map(str, types))}"
                f"{'' if spec.is_leaf() else ' in a ' + (spec.type or tuple).__name__}; reduce it with a mean or a sum"
            )


def _like(batch: Sequence[Tensor]) -> Batch:
    return tuple((tuple(x.shape), x.dtype, str(x.device)) for x in batch)
