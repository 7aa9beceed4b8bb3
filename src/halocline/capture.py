"""Capture: an `nn.Module`, its loss and a batch become a `Graph` at global shapes, through `torch.export`."""

import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from operator import getitem
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from .autocast import LEAF_CAST, with_casts
from .errors import CaptureError
from .functional import MAY_RETURN_INPUT, functional
from .graph import Graph, Node, TensorType
from .inline import FIXED, inlined
from .ops.call_op import aten, bound, node_of
from .source import line_of_assignment, line_of_error, origin, where_nested
from .tracing import DataIsDetached, numbered_momentum, structure, with_counters
from .watched import Place, changes, check_steady, kept, nothing_dropped, put_as_left, put_back

Loss = Callable[..., Tensor]
DROPPED = {"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range_for_size"}
_ONE_AT_A_TIME = Lock()  # torch.export keeps global state; ranks may be threads of one process


class Wrapped(nn.Module):
    """The model with its loss: `forward(*inputs, target)` is the loss, or the model's output when there is none."""

    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.notes = SimpleNamespace(changed={})  # the attributes that the last forward pass has changed

    def forward(self, *batch: Any) -> Any:
        before, buffers = kept(self), dict(self.named_buffers(remove_duplicate=False))
        with DataIsDetached(), numbered_momentum(self):
            output = self.model(*batch) if self.loss is None else self.loss(self.model(*batch[:-1]), batch[-1])
        for name, now in self.named_buffers(remove_duplicate=False):
            if buffers.get(name) is not now:
                _change_in_place(self, name, buffers.get(name), now)
        self.notes.changed = changes(before, kept(self))
        return output


def _change_in_place(whole: nn.Module, path: str, before: Tensor | None, now: Tensor) -> None:
    """A buffer that was replaced while the model ran is changed in place instead, as the graph can say it."""
    prefix, _, name = path.rpartition(".")
    module = whole.get_submodule(prefix)
    if before is None or before.shape != now.shape or before.dtype != now.dtype:
        raise CaptureError(
            f"the model cannot be captured: {line_of_assignment(module, name)}: the buffer `{name}` changes its shape "
            "or dtype from step to step. Register it with one shape and dtype."
        )
    with torch.no_grad():
        before.copy_(now)
    setattr(module, name, before)


def capture(model: nn.Module, loss: Loss | None, batch: Sequence[Any]) -> tuple[Graph, pytree.TreeSpec]:
    """The graph of `loss(model(*batch[:-1]), batch[-1])`, or of `model(*batch)`, and the structure of its output.

    `batch` gives global shapes and dtypes; its values are not read, so it may be on the meta device, and so may the
    model. The module is not changed.
    Raises CaptureError, with the user's source line, for what cannot be captured.
    """
    wrapped, batch = Wrapped(model, loss), on_device_of(model, batch)
    with _ONE_AT_A_TIME, nothing_dropped(wrapped):
        before = kept(wrapped)
        graph, spec, changed = _captured(wrapped, batch)
        if changed:  # the model's code keeps something: does that change what the next forward pass does?
            put_as_left(wrapped, changed)
            try:
                again, _, more = _captured(wrapped, batch)
            finally:
                put_back(wrapped, before, changed)
            check_steady(wrapped, changed, more, str(again) == str(graph))
    return graph, spec


def on_device_of(model: nn.Module, batch: Sequence[Any]) -> list[Any]:
    """The batch, its tensors on the meta device, which only have shapes, replaced by empty ones beside the model's."""
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    return [torch.empty_like(x, device=device) if isinstance(x, Tensor) and x.is_meta else x for x in batch]


def _captured(wrapped: Wrapped, batch: Sequence[Any]) -> tuple[Graph, pytree.TreeSpec, Mapping[Place, Any]]:
    """The graph, the structure of the output, and the attributes that running the model changed, which are put back."""
    before = kept(wrapped)
    try:
        with _quiet():
            exported = torch.export.export(wrapped, tuple(batch), strict=False)
    except CaptureError:
        raise
    except Exception as error:  # torch.export raises many kinds
        raise CaptureError(_why_not(error)) from error
    finally:
        put_back(wrapped, before, changes(before, kept(wrapped)))
    spec = structure(exported)
    if spec is None:
        raise CaptureError("the model returns nothing")
    return _Reader(exported).graph(), spec, wrapped.notes.changed


@contextmanager
def _quiet() -> Iterator[None]:
    """While `torch.export` fails it prints the graph it has so far, and logs what its error says too: left out."""
    log, said = logging.getLogger("torch.fx.experimental.symbolic_shapes"), io.StringIO()
    log.disabled, before = True, log.disabled
    try:
        with redirect_stderr(said), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The tensor attribute")  # `watched` looks at these itself
            yield
    finally:
        log.disabled = before
    sys.stderr.write(said.getvalue())


def _why_not(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    text = f"the model cannot be captured: {line_of_error(error)}: {type(error).__name__}: {first}"
    if "data-dependent" in str(error).lower() or "data dependent" in str(error).lower():
        text += (
            " Python control flow must not depend on values of tensors; use torch.where, or take it out of the model."
        )
    return text


class _Reader:
    """Reads an exported program node by node; `env` holds what each fx node stands for."""

    def __init__(self, exported: ExportedProgram) -> None:
        self.exported = exported
        self.env: dict[fx.Node, Any] = {}
        self.types: dict[str, TensorType] = {}
        self.nodes: list[Node] = []
        self.inputs: dict[str, TensorType] = {}
        self.parameters: dict[str, str] = {}
        self.buffers: dict[str, str] = {}
        self.frozen: set[str] = set()  # parameters that need no gradient: the model may change them, as buffers
        self.constants: dict[str, Tensor] = {}
        self.updates: dict[str, str] = {}
        self.buffer_of: dict[str, str] = {}  # a value that stands for a buffer -> the buffer's graph name
        self.cast_leaves: dict[fx.Node, TensorType] = {}  # what stands for a leaf in another dtype
        self.aliases: dict[str, int] = {}  # values that may share memory have the same number

    def graph(self) -> Graph:
        placeholders = [node for node in self.exported.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(placeholders, self.exported.graph_signature.input_specs, strict=True):
            self._placeholder(node, spec)
        leaves = frozenset({*self.parameters, *self.buffers, *self.constants})
        changeable = frozenset({*self.buffers, *self.frozen})
        graph = inlined(self.exported.graph_module, changeable)
        fixed = frozenset({*self.parameters, *self.inputs} - self.frozen)
        order = list(functional(with_casts(graph, leaves), changeable, fixed).nodes)
        for position, node in enumerate(order):
            if node.op == "call_function":
                self._call(node, order[position + 1 :])
            elif node.op == "get_attr":
                raise CaptureError(
                    f"{where_nested(node, self.exported.graph_module)} makes a nested graph, which is not supported"
                )
        (output,) = (node for node in order if node.op == "output")
        specs = self.exported.graph_signature.output_specs
        values = [
            self.env[arg]
            for arg, spec in zip(output.args[0], specs, strict=True)
            if spec.kind == OutputKind.USER_OUTPUT and isinstance(arg, fx.Node)
        ]
        if any(isinstance(value, torch.SymInt | torch.SymFloat) for value in values):
            raise CaptureError(
                "the model returns a number that depends on the values of tensors: return it as a tensor"
            )
        outputs = tuple(value for value in values if isinstance(value, str))
        for name in self.frozen & self.updates.keys():
            self.buffers[name] = self.parameters.pop(name)
        return with_counters(Graph(
            tuple(self.nodes), self.inputs, self.parameters, self.buffers, outputs, self.updates, self.types,
            self.constants,
        ))  # fmt: skip

    def _placeholder(self, node: fx.Node, spec: Any) -> None:
        name = node.name
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            if spec.kind == InputKind.USER_INPUT:
                self.env[node] = value if value is not None else spec.arg.value
                return
            raise CaptureError(f"`{spec.target}` is not a tensor ({spec.kind.name}), which is not supported")
        path = (spec.target or "").removeprefix("model.")
        if spec.kind == InputKind.PARAMETER:
            self.parameters[name] = path
            if not value.requires_grad:
                self.frozen.add(name)
                self.buffer_of[name] = name
        elif spec.kind == InputKind.BUFFER:
            self.buffers[name] = path
            self.buffer_of[name] = name
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            self.constants[name] = self.exported.constants[spec.target]
        else:
            self.inputs[name] = _type(value)
        self._define(node, name, _type(value))

    def _define(self, node: fx.Node, name: str, type: TensorType) -> None:
        self.env[node], self.types[name] = name, type
        self.aliases.setdefault(name, len(self.aliases))

    def _value(self, argument: Any) -> tuple[str, TensorType] | None:
        if not isinstance(argument, fx.Node):
            return None
        name = self.env[argument]
        if not isinstance(name, str):
            raise CaptureError(f"{origin(argument)}: a value that is not a tensor is passed to an op")
        return name, self.cast_leaves.get(argument, self.types[name])

    def _call(self, node: fx.Node, later: Sequence[fx.Node]) -> None:
        if node.target is getitem:
            source, number = node.args
            assert isinstance(source, fx.Node) and isinstance(number, int)
            self._output(node, source, number)
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise CaptureError(
                f"{origin(node)}: a shape here depends on the values of tensors (`{node.target}`), so it is not known "
                "before the data is. Select by a mask and torch.where instead."
            )
        if node.target._schema.name.removeprefix("aten::") in DROPPED:
            return
        if "c10d" in node.target.namespace:
            raise CaptureError(
                f"{origin(node)}: the model itself communicates (`{node.target}`), but in a step every value is "
                "that of the whole batch already. Turn it off in the model, as `ddp_sync=False` does in MONAI's VQVAE."
            )
        if node.meta.get(LEAF_CAST):
            self.env[node], self.cast_leaves[node] = self.env[node.args[0]], _type(node.meta["val"])  # type: ignore[index]
        elif isinstance(node.meta.get("val"), Tensor):
            self._add(node, node, later)
        elif node.target._schema.name.startswith("aten::sym"):
            self.env[node] = node.meta["val"]

    def _output(self, node: fx.Node, source: fx.Node, number: int) -> None:
        """One output of an op that has several: pieces of a tensor become slices, others name their number."""
        target, arguments = source.target, bound(source.target, source.args, source.kwargs)  # type: ignore[attr-defined]
        op = target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
        if op in ("chunk", "split", "split_with_sizes", "tensor_split", "unbind", "unsafe_split", "unsafe_chunk"):
            dim = arguments["dim"]
            pieces = source.meta["val"]
            if op == "unbind":
                self._add_call(node, aten("aten.select.int"), {"self": arguments["self"], "dim": dim, "index": number})
                return
            start = sum(piece.shape[dim] for piece in pieces[:number])
            end = start + pieces[number].shape[dim]
            sliced = {"self": arguments["self"], "dim": dim, "start": start, "end": end, "step": 1}
            self._add_call(node, aten("aten.slice.Tensor"), sliced)
        elif op == "broadcast_tensors":
            tensor, shape = arguments["tensors"][number], node.meta["val"].shape
            if tensor.meta["val"].shape == shape:
                self.env[node] = self.env[tensor]
            else:
                expanded = {"self": tensor, "size": tuple(shape), "implicit": False}
                self._add_call(node, aten("aten.expand.default"), expanded)
        else:
            self._add_call(node, target, arguments, number)

    def _add(self, node: fx.Node, call: fx.Node, later: Sequence[fx.Node]) -> None:
        target: Any = call.target
        arguments = bound(target, call.args, call.kwargs)
        mutated = target._schema.name.endswith("_") and target._schema.arguments[0].is_write
        if not mutated:
            self._add_call(node, target, arguments)
            return
        first = call.args[0]
        assert isinstance(first, fx.Node)
        old = self.env[first]
        self._refuse_seen_alias(node, old, later)
        functional = getattr(getattr(torch.ops.aten, target._schema.name[6:-1], None), target._overloadname, None)
        if functional is None or old in self.inputs or old in self.parameters.keys() - self.frozen:
            raise CaptureError(f"{origin(node)}: `{target}` changes {old} {FIXED}")
        self._add_call(node, functional, arguments)
        new = self.env[node]
        if self.types[new] != self.types[old]:
            raise CaptureError(
                f"{origin(node)}: `{target}` in place would turn {self.types[old]} into {self.types[new]}"
            )
        for other, value in self.env.items():
            if value == old:
                self.env[other] = new
        if old in self.buffer_of:
            self.buffer_of[new] = self.buffer_of[old]
            self.updates[self.buffer_of[new]] = new

    def _refuse_seen_alias(self, node: fx.Node, name: str, later: Sequence[fx.Node]) -> None:
        """An in-place op is renamed, which is right as long as nobody looks at the memory under another name."""
        others = {other for other, number in self.aliases.items() if number == self.aliases[name]} - {name}
        for user in later if others else ():
            for argument in user.all_input_nodes:
                if self.env.get(argument) in others:
                    raise CaptureError(
                        f"{origin(node)}: an in-place op changes a view, or something that has views, and "
                        f"`{argument}` shows the same memory and is used later. Use the op's out-of-place form."
                    )

    def _add_call(self, node: fx.Node, target: Any, arguments: dict[str, Any], output: int | None = None) -> None:
        value = node.meta["val"]
        made = node_of(target, arguments, self._value, node.name, _type(value), origin(node), output)
        self.nodes.append(made)
        self._define(node, node.name, made.type)
        views = [argument for argument in target._schema.arguments if argument.alias_info and not argument.is_write]
        if made.inputs and (views or made.op in MAY_RETURN_INPUT):
            self.aliases[made.name] = self.aliases[made.inputs[0]]


def _type(value: Tensor) -> TensorType:
    return TensorType(tuple(int(size) for size in value.shape), value.dtype)
