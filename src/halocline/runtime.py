"""Runs a `Program` on one rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from .autocast import without_autocast
from .comm.comm import DONE, Comm, Handle
from .exchange import Mover, Moving, channels_last, off_wire, on_wire
from .graph import Node
from .ops import rule_for
from .ops.moments import merge_moments
from .ops.rule import AdditiveRule, Call, Grads, Noise, Rule, StagedRule
from .program import (
    Again,
    Bucket,
    Compute,
    Free,
    Gradient,
    GradientReduce,
    Instruction,
    Once,
    Program,
    Reduce,
    Start,
    StartAdjoint,
    StartSum,
    Wait,
    WaitAdjoint,
    WaitSum,
)
from .region import Region


@dataclass
class Tape:
    """What one forward pass leaves for its backward pass, and what both have under way."""

    values: dict[str, Tensor] = field(default_factory=dict)  # what this rank owns, and what it fetched
    boxes: dict[str, list[tuple[Region, Tensor]]] = field(default_factory=dict)  # what it fetched and keeps apart
    moving: dict[str, Moving] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, Any] = field(default_factory=dict)  # the generator of a node between two of its stages
    partial: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)  # of both
    box_grads: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    leaf_grads: dict[tuple[str, tuple[str, ...]], Tensor] = field(default_factory=dict)
    sums: dict[int, tuple[Handle, list[tuple[int, ...]], Tensor]] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    number: int = 0  # of the step
    leaves: dict[str, Tensor] = field(default_factory=dict)  # as they were, where something is recomputed
    again: bool = False  # whether the forward pass of a segment runs a second time
    spent: bool = False
    keep: bool = False  # whether values outlive their last reader


@dataclass(frozen=True)
class Bound:
    """A node with its rule, bound to this rank."""

    node: Node
    rule: Rule
    call: Call
    feeds: tuple[str, ...]
    apart: str | None  # the fetch whose boxes stay apart
    sums: tuple[tuple[str, ...], ...]  # for each input that is a leaf, the axes over which its gradient is summed
    casts: tuple[tuple[torch.dtype, torch.dtype] | None, ...]  # for each leaf that is read in another dtype: both
    passing: Call | None  # the call that keeps nothing, where the node will run again
    absorbed: bool  # whether the node before does this one's work

    def inputs(self, tape: Tape, first: int = 0) -> list[Tensor]:
        """What this rank reads, from the input `first` on."""
        pairs = zip(self.feeds[first:], self.casts[first:])
        return [tape.values[key] if cast is None else tape.values[key].to(cast[1]) for key, cast in pairs]


class Runner:
    """One rank's interpreter of a program: everything that does not change from step to step is worked out once."""

    def __init__(self, program: Program, comm: Comm, noise: Noise) -> None:
        self.program, self.comm, self.mesh, self.noise = program, comm, program.placement.mesh, noise
        self.channels_last = program.placement.plan.memory_format == "channels_last"
        self.movers = {
            key: Mover(fetch.transfer, comm.rank, self.channels_last) for key, fetch in program.fetches.items()
        }
        self.apart = frozenset(program.apart.values())
        self.bound = {node.name: self._bind(node, noise) for node in program.graph.nodes}
        self._do: Mapping[type, Callable[[Tape, Any], None]] = {
            Start: self._start,
            Wait: self._wait,
            Compute: self._compute,
            Reduce: self._reduce,
            Free: self._free,
            Gradient: self._gradient,
            GradientReduce: self._reduce,
            StartAdjoint: self._start_adjoint,
            WaitAdjoint: self._wait_adjoint,
            StartSum: self._start_sum,
            WaitSum: self._wait_sum,
            Again: self._again,
            Once: self._once,
        }
        self.forward_list = [(self._do[type(step)], step) for step in program.forward]
        self.backward_list = [(self._do[type(step)], step) for step in program.backward]
        self.backward_without_sums = [
            (do, step) for do, step in self.backward_list if not isinstance(step, StartSum | WaitSum)
        ]

    def _bind(self, node: Node, noise: Noise) -> Bound:
        placement, rule, rank = self.program.placement, rule_for(node), self.comm.rank
        at = placement.at(node, rank)
        wanted = tuple(
            name in self.program.differentiable and node.name in self.program.differentiable for name in node.inputs
        )
        manner = self.program.manners[node.name]
        reads, writes = rule.reads(node, at), rule.writes(node, at)
        call = Call(node, at, reads, writes, wanted, noise, manner.overwrite, manner.then)
        over, replicated = self.mesh.ordered(placement.over(node)), self.program.graph.replicated
        sums = tuple(over if name in replicated else () for name in node.inputs)
        dtypes = [
            (self.program.graph.types[name].dtype, type.dtype) for name, type in zip(node.inputs, node.input_types)
        ]
        casts = tuple(None if leaf == read else (leaf, read) for leaf, read in dtypes)
        recomputed = node.name in self.program.recomputed
        passing = replace(call, wanted=(False,) * len(wanted)) if recomputed else None
        feeds, apart = self.program.feeds[node.name], self.program.apart.get(node.name)
        return Bound(node, rule, call, feeds, apart, sums, casts, passing, manner.absorbed)

    @torch.no_grad()
    def forward(self, values: Mapping[str, Tensor], keep: bool = False) -> tuple[list[Tensor], Tape]:
        """This rank's part of every output, from its part of the inputs and the whole of all leaves.

        With `keep` the tape holds this rank's part of every value afterwards, to be looked at.
        """
        tape = Tape(values=dict(values), keep=keep, device=next(iter(values.values())).device, number=self.noise.step)
        if self.program.recomputed:
            buffers = self.program.graph.buffers
            leaves = self.program.graph.replicated
            tape.leaves = {name: values[name].clone() if name in buffers else values[name] for name in leaves}
        if self.channels_last:
            for name in self.program.graph.inputs:
                tape.values[name] = channels_last(tape.values[name])
        with without_autocast(tape.device.type):  # the graph has the casts
            self._run(self.forward_list, tape)
        graph = self.program.graph
        for buffer, value in graph.updates.items():
            values[buffer].copy_(tape.values[value])
        outputs = [tape.values[name] for name in graph.outputs]
        if not keep:
            tape.values = {name: tape.values[name] for name in self.program.kept}
        return outputs, tape

    @torch.no_grad()
    def backward(self, tape: Tape, grads: Sequence[Tensor | None], sums: bool = True) -> dict[str, Tensor]:
        """The gradient of every wanted leaf, whole on every rank, from this rank's part of the outputs' gradients.

        Without `sums`, gradients that are still to be summed over ranks are left in `tape.leaf_grads`.
        """
        for name, grad in zip(self.program.graph.outputs, grads, strict=True):
            if grad is not None and name in self.program.differentiable:
                _add(tape.grads, name, grad)
        with without_autocast(tape.device.type):
            self._run(self.backward_list if sums else self.backward_without_sums, tape)
        return tape.grads

    def _run(self, steps: Sequence[tuple[Callable[[Tape, Any], None], Instruction]], tape: Tape) -> None:
        step: Instruction | None = None
        try:
            for do, step in steps:
                do(tape, step)
        except Exception as error:
            name = getattr(step, "node", None)
            where = self.bound[name].node.where() if name else str(step)
            error.add_note(f"halocline: rank {self.comm.rank}, {type(step).__name__} of {where}")
            raise

    def _start(self, tape: Tape, step: Start) -> None:
        own = tape.values[self.program.fetches[step.fetch].value]
        tape.moving[step.fetch] = self.movers[step.fetch].start(own, self.comm)

    def _wait(self, tape: Tape, step: Wait) -> None:
        mover, moving = self.movers[step.fetch], tape.moving.pop(step.fetch)
        if step.fetch in self.apart:
            tape.boxes[step.fetch] = mover.finish_apart(moving)
        else:
            tape.values[step.fetch] = mover.finish(moving)

    def _compute(self, tape: Tape, step: Compute) -> None:
        bound = self.bound[step.node]
        if bound.apart is not None:
            self._compute_apart(tape, step, bound, bound.apart)
            return
        if bound.absorbed and not tape.keep:
            tape.values[step.node] = tape.values[bound.feeds[0]]
            return
        if not isinstance(bound.rule, StagedRule):
            if bound.call.writes.empty:
                like = torch.empty(bound.call.writes.shape, dtype=bound.node.type.dtype, device=tape.device)
                tape.values[step.node] = like
                return
            output, saved = bound.rule.forward(self._call(tape, bound), bound.inputs(tape))
        else:
            if step.stage == 0:
                inputs = bound.inputs(tape)
                tape.stages[step.node] = bound.rule.forward_stages(self._call(tape, bound), inputs)
            done = self._advance(tape, step)
            if done is None:
                return
            output, saved = done
        tape.values[step.node] = output
        if saved is not None:
            tape.saved[step.node] = saved

    def _call(self, tape: Tape, bound: Bound) -> Call:
        """The call, which keeps what the backward pass needs unless it will run again before that."""
        call = bound.call if tape.again or bound.passing is None else bound.passing
        return replace(call, overwrite=False, then="") if tape.keep else call  # every value is to be looked at

    def _again(self, tape: Tape, step: Again) -> None:
        tape.again, tape.number, self.noise.step = True, self.noise.step, tape.number  # draws what it drew then
        tape.values |= tape.leaves

    def _once(self, tape: Tape, step: Once) -> None:
        tape.again, tape.number, self.noise.step = False, self.noise.step, tape.number
        for name in tape.leaves:
            tape.values.pop(name, None)

    def _gradient(self, tape: Tape, step: Gradient) -> None:
        bound = self.bound[step.node]
        if bound.apart is not None:
            self._gradient_apart(tape, step, bound, bound.apart)
            return
        if step.stage == 0:
            grad = tape.grads.pop(step.node, None)
            if bound.absorbed:
                if grad is not None:
                    tape.grads[bound.feeds[0]] = grad
                return
            saved = tape.saved.pop(step.node, None)
            if not isinstance(bound.rule, StagedRule):
                if grad is not None and not bound.call.writes.empty:
                    self._add_grads(tape, bound, bound.rule.backward(bound.call, saved, grad))
                return
            if grad is None:
                grad = torch.zeros(bound.call.writes.shape, dtype=bound.node.type.dtype, device=tape.device)
            tape.stages[step.node] = bound.rule.backward_stages(bound.call, saved, grad)
        done = self._advance(tape, step)
        if done is not None:
            self._add_grads(tape, bound, done)

    def _compute_apart(self, tape: Tape, step: Compute, bound: Bound, fetch: str) -> None:
        """Stage 0: what the owned block gives. Stage 1: what the boxes of others add to it."""
        rule, call, mover = bound.rule, self._call(tape, bound), self.movers[fetch]
        assert isinstance(rule, AdditiveRule)
        others = bound.inputs(tape, 1)
        if step.stage == 0:
            own = mover.kept(tape.values[bound.node.inputs[0]])
            _, output, saved = rule.forward_box(call, mover.keeps, [own, *others], base=True)
            tape.values[step.node] = output
            if call is bound.call:
                tape.saved[step.node] = [(mover.keeps, call.writes, saved)]
            return
        output = tape.values[step.node]
        for box, piece in tape.boxes[fetch]:
            region, part, saved = rule.forward_box(call, box, [piece, *others], base=False)
            if not region.empty:
                output[region.within(call.writes)] += part
            if call is bound.call:
                tape.saved[step.node].append((box, region, saved))

    def _gradient_apart(self, tape: Tape, step: Gradient, bound: Bound, fetch: str) -> None:
        """Stage 0: the gradients of the boxes, which are awaited elsewhere. Stage 1: that of the owned block."""
        rule, call = bound.rule, bound.call
        assert isinstance(rule, AdditiveRule)
        if step.stage == 0:
            grad = tape.grads.get(step.node)
            for number, (box, region, saved) in enumerate(tape.saved[step.node][1:]):
                grads: Grads = (None,)
                if grad is not None and not region.empty:
                    grads = rule.backward_box(call, saved, grad[region.within(call.writes)])
                    self._add_grads(tape, bound, (None, *grads[1:]))
                if call.wanted[0]:
                    box_grad = self._zeros(tape, bound.node.inputs[0], box) if grads[0] is None else grads[0]
                    _add(tape.box_grads.setdefault(fetch, {}), number, box_grad)
            return
        grad, saved = tape.grads.pop(step.node, None), tape.saved.pop(step.node)
        if grad is not None and not call.writes.empty:
            self._add_grads(tape, bound, rule.backward_box(call, saved[0][2], grad))

    def _zeros(self, tape: Tape, value: str, region: Region) -> Tensor:
        return torch.zeros(region.shape, dtype=self.program.graph.types[value].dtype, device=tape.device)

    def _advance(self, tape: Tape, step: Compute) -> Any:
        """Runs a staged node up to its next partial value; its result, or None when there is more to come."""
        try:
            stages = tape.stages[step.node]
            tape.partial[step.node] = next(stages) if step.stage == 0 else stages.send(tape.partial.pop(step.node))
            return None
        except StopIteration as end:
            del tape.stages[step.node]
            return end.value

    def _reduce(self, tape: Tape, step: Reduce) -> None:
        partial = tape.partial[step.node].contiguous()
        if step.kind == "moments":
            for axis in step.axes:
                partial = merge_moments(self._gathered(partial, self.mesh.group(self.comm.rank, (axis,))))
        elif step.axes and partial.numel():
            group = self.mesh.group(self.comm.rank, step.axes)
            self.comm.all_reduce(partial, group, step.kind).wait()  # type: ignore[arg-type]
        tape.partial[step.node] = partial

    def _gathered(self, row: Tensor, group: tuple[int, ...]) -> Tensor:
        """The rows of all ranks of `group`, in order: along one mesh axis at a time, messages stay few."""
        rows = [row if rank == self.comm.rank else torch.empty_like(row) for rank in group]
        others = [(rank, buffer) for rank, buffer in zip(group, rows) if rank != self.comm.rank]
        if others and row.numel():
            self.comm.exchange([(rank, row) for rank, _ in others], others).wait()
        return torch.stack(rows)

    def _free(self, tape: Tape, step: Free) -> None:
        if not tape.keep:
            for name in step.names:
                tape.values.pop(name, None)
                tape.boxes.pop(name, None)

    def _add_grads(self, tape: Tape, bound: Bound, grads: Sequence[Tensor | None]) -> None:
        wanted = zip(bound.feeds, grads, bound.call.wanted, bound.sums, bound.casts, strict=True)
        for key, grad, want, axes, cast in wanted:
            if want and grad is not None:
                grad = grad if cast is None else grad.to(cast[0])
                if axes and key not in self.movers:
                    _add(tape.leaf_grads, (key, axes), grad)
                else:
                    _add(tape.grads, key, grad)

    def _start_adjoint(self, tape: Tape, step: StartAdjoint) -> None:
        mover, value = self.movers[step.fetch], self.program.fetches[step.fetch].value
        if step.fetch in self.apart:
            grads = tape.box_grads.pop(step.fetch, {})
            like = torch.empty(0, dtype=self.program.graph.types[value].dtype, device=tape.device)
            tape.moving[step.fetch] = mover.start_adjoint_apart(list(grads.values()), like, self.comm)
            return
        grad = tape.grads.pop(step.fetch, None)
        if grad is None:  # this rank's part is empty, or does not depend on it
            grad = self._zeros(tape, value, mover.need)
        tape.moving[step.fetch] = mover.start_adjoint(grad, self.comm)

    def _wait_adjoint(self, tape: Tape, step: WaitAdjoint) -> None:
        fetch, mover, moving = self.program.fetches[step.fetch], self.movers[step.fetch], tape.moving.pop(step.fetch)
        if step.fetch in self.apart:
            kept = tape.grads.pop(step.fetch, None)
            total = mover.finish_adjoint_apart(
                moving, self._zeros(tape, fetch.value, mover.keeps) if kept is None else kept
            )
        else:
            total = mover.finish_adjoint(moving)
        axes = fetch.transfer.sum_axes
        if not axes:
            _add(tape.grads, fetch.value, total)
        elif fetch.value in self.program.graph.replicated:
            _add(tape.leaf_grads, (fetch.value, axes), total)
        else:
            total = total.contiguous().clone()
            if total.numel():
                self.comm.all_reduce(total, self.mesh.group(self.comm.rank, axes)).wait()
            _add(tape.grads, fetch.value, total)

    def _start_sum(self, tape: Tape, step: StartSum) -> None:
        bucket: Bucket = step.bucket
        grads = [self._leaf_grad(tape, name, bucket.axes) for name in bucket.leaves]
        flat = torch.cat([on_wire(grad, self.channels_last) for grad in grads])
        handle = self.comm.all_reduce(flat, self.mesh.group(self.comm.rank, bucket.axes)) if flat.numel() else DONE
        tape.sums[bucket.number] = handle, [tuple(grad.shape) for grad in grads], flat

    def _leaf_grad(self, tape: Tape, name: str, axes: tuple[str, ...]) -> Tensor:
        grad = tape.leaf_grads.pop((name, axes), None)
        if grad is None:
            grad = self._zeros(tape, name, Region.whole(self.program.graph.types[name].shape))
        return grad

    def _wait_sum(self, tape: Tape, step: WaitSum) -> None:
        handle, shapes, flat = tape.sums.pop(step.bucket.number)
        handle.wait()
        pieces = flat.split([prod(shape) for shape in shapes])
        for name, shape, piece in zip(step.bucket.leaves, shapes, pieces):
            _add(tape.grads, name, off_wire(piece, shape, self.channels_last))


def _add(grads: dict[Any, Tensor], key: Any, grad: Tensor) -> None:
    """Adds to a gradient. Never in place: what autograd returns may be one tensor for two inputs."""
    grads[key] = grads[key] + grad if key in grads else grad
