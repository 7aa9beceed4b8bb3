"""`estimate`: the predicted time and memory of a step under a plan, node by node."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ..gradients import carrying, manners, trained, wanted_inputs
from ..graph import Graph, Node
from ..lowering import BUCKET_BYTES
from ..mesh import Mesh
from ..ops import rule_for
from ..ops.rule import StagedRule
from ..placement import Plan
from .collective import allreduce_s, gather_along_axes_s
from .local_times import LocalCall, LocalTimes
from .machine import Machine
from .memory import Memory, memory_of
from .movement import NOTHING, beside_s, may_stay_apart, packing_s, received, returned
from .sampled import Sampled
from .work import partial_bytes


@dataclass(frozen=True)
class NodeCost:
    """Where a node's time goes, in seconds on the slowest of the sample ranks, and what moves in the forward pass.

    `halo_s` is for inputs that are split over the same axes as the node, `redistribution_s` for the others; both hold
    the adjoint. `sums_s` combines partial values, `gradient_sum_s` is the sum of its parameters' gradients if nothing
    hides it.
    """

    name: str
    op: str
    module: str
    split: str
    forward_s: float
    backward_s: float
    halo_s: float
    redistribution_s: float
    sums_s: float
    gradient_sum_s: float
    moved_bytes: int
    messages: int

    @property
    def seconds(self) -> float:
        """The time of the node but for the sums of its parameters' gradients, which may be hidden."""
        return self.forward_s + self.backward_s + self.halo_s + self.redistribution_s + self.sums_s


@dataclass(frozen=True)
class Estimate:
    """The predicted step: nodes in order, gradient sums that nothing hides, optimizer, memory of the fullest rank."""

    nodes: tuple[NodeCost, ...]
    exposed_sums_s: float
    optimizer_s: float
    memory: Memory

    @cached_property
    def seconds(self) -> float:
        """The time of a step."""
        return sum(node.seconds for node in self.nodes) + self.exposed_sums_s + self.optimizer_s

    @cached_property
    def totals(self) -> Mapping[str, float]:
        """The time of a step, by what it is spent on."""
        parts = ("forward_s", "backward_s", "halo_s", "redistribution_s", "sums_s")
        found = {part: sum(getattr(node, part) for node in self.nodes) for part in parts}
        return {**found, "exposed_sums_s": self.exposed_sums_s, "optimizer_s": self.optimizer_s}

    def of(self, name: str) -> NodeCost:
        return next(node for node in self.nodes if node.name == name)


def estimate(graph: Graph, plan: Plan, machine: Machine, times: LocalTimes) -> Estimate:
    """What a training step of `graph` under `plan` takes on `machine`, with the local `times`."""
    return _Estimating(Sampled(graph, plan), machine, times).result()


class _Estimating:
    def __init__(self, sampled: Sampled, machine: Machine, times: LocalTimes) -> None:
        self.sampled, self.machine, self.times = sampled, machine, times
        self.graph, self.mesh = sampled.graph, sampled.mesh
        self.trained = trained(self.graph)
        self.carried = carrying(self.graph, self.trained)
        self.manners = manners(self.graph)
        self.seen: dict[tuple[object, ...], None] = {}  # fetches that another reader shares

    def result(self) -> Estimate:
        nodes = tuple(self._node(node) for node in self.graph.nodes)
        exposed = self._sums(nodes)
        return Estimate(nodes, exposed, optimizer_s(self.graph, self.machine), memory_of(self.sampled, self.carried))

    def _node(self, node: Node) -> NodeCost:
        costs = [self._at_rank(node, rank) for rank in self.sampled.ranks]
        slowest = max(costs, key=lambda cost: cost.seconds)
        largest = max(costs, key=lambda cost: cost.moved_bytes)
        return replace(
            slowest, gradient_sum_s=self._gradient_sum(node), moved_bytes=largest.moved_bytes, messages=largest.messages
        )

    def _at_rank(self, node: Node, rank: int) -> NodeCost:
        reads, writes = self.sampled.reads[node.name, rank], self.sampled.writes[node.name, rank]
        wanted = wanted_inputs(node, self.carried)
        call = LocalCall(node, self.sampled.at(node, rank), reads, writes, wanted, self.manners[node.name])
        forward, backward = self.times.seconds(call)
        over = self.sampled.over(node)
        halo = redistribution = 0.0
        moved = messages = 0
        for position, (value, need, type, want) in enumerate(zip(node.inputs, reads, node.input_types, wanted)):
            owns = self.sampled.layouts[value]
            if value in self.graph.replicated and not owns.axes and owns.region(rank) == need:
                continue
            shared = (value, rank, need, over)
            if shared in self.seen:
                continue
            self.seen[shared] = None
            there = received(self.machine, owns, need, rank, type.dtype.itemsize)
            back, sums = NOTHING, 0.0
            if want and value not in self.graph.replicated:
                back, sums = returned(self.machine, owns, need, rank, type.dtype.itemsize, over)
            if there.messages and may_stay_apart(self.mesh, node, position, owns, need, owns.region(rank)):
                seconds = beside_s(self.machine, there, forward) + beside_s(self.machine, back, backward) + sums
            else:
                seconds = there.seconds + back.seconds + sums
            if owns.axes == over:
                halo += seconds
            else:
                redistribution += seconds
            moved, messages = moved + there.nbytes, messages + there.messages
        split = self.sampled.plan.splits.get(node.name, {})
        text = " ".join(f"{index}/{self.mesh.parts(axes)}" for index, axes in split.items() if axes) or "whole"
        return NodeCost(
            node.name, node.op, node.origin.module, text, forward, backward, halo, redistribution,
            self._stage_sums(node, rank), 0.0, moved, messages,
        )  # fmt: skip

    def _stage_sums(self, node: Node, rank: int) -> float:
        rule, parts = rule_for(node), self.sampled.parts[node.name]
        if not isinstance(rule, StagedRule):
            return 0.0
        total = 0.0
        backward = rule.grad_reductions(node) if node.name in self.carried else ()
        for reductions, forward in ((rule.reductions(node), True), (backward, False)):
            nbytes = partial_bytes(node, self.sampled.writes[node.name, rank], forward)
            for reduction in reductions:
                axes = frozenset(axis for index in reduction.over if index in parts for axis in parts[index].axes)
                total += reduction_s(self.machine, self.mesh, reduction.kind, self.mesh.ordered(axes), nbytes)
        return total

    def _gradient_sum(self, node: Node) -> float:
        nbytes = sum(self.graph.types[leaf].nbytes for leaf, _ in self._leaves(node))
        axes = self.mesh.ordered(self.sampled.over(node))
        return allreduce_s(self.machine, self.mesh, axes, nbytes) if nbytes else 0.0

    def _sums(self, nodes: tuple[NodeCost, ...]) -> float:
        """What remains of the gradient sums after the backward pass, started greedily in buckets as it goes on."""
        clock = free = blocked = 0.0
        waiting: dict[tuple[str, ...], float] = {}
        readers = Counter(leaf for node in self.graph.nodes for leaf in self._leaves(node))
        for node, cost in zip(reversed(self.graph.nodes), reversed(nodes), strict=True):
            if node.name not in self.carried:
                continue
            clock += cost.backward_s + (cost.halo_s + cost.redistribution_s + cost.sums_s) / 2
            for leaf, axes in self._leaves(node):
                readers[leaf, axes] -= 1
                if not readers[leaf, axes] and axes:
                    waiting[axes] = waiting.get(axes, 0.0) + self.graph.types[leaf].nbytes
                    if waiting[axes] >= BUCKET_BYTES:
                        free, blocked = self._start(axes, waiting.pop(axes), clock, free, blocked)
        for axes, nbytes in waiting.items():
            free, blocked = self._start(axes, nbytes, clock, free, blocked)
        return max(0.0, free - clock) + blocked

    def _start(
        self, axes: tuple[str, ...], nbytes: float, clock: float, free: float, blocked: float
    ) -> tuple[float, float]:
        """When the link is free again after another bucket's sum, and the time that cannot run beside computation."""
        full = allreduce_s(self.machine, self.mesh, axes, nbytes)
        hidden = self.machine.overlap * full
        return max(clock, free) + hidden, blocked + full - hidden + packing_s(self.machine, nbytes)

    def _leaves(self, node: Node) -> list[tuple[str, tuple[str, ...]]]:
        """The parameters whose gradient the node's backward pass gives a part of, and over which axes it is summed."""
        if node.name not in self.carried:
            return []
        over = self.mesh.ordered(self.sampled.over(node))
        return [(value, over) for value in dict.fromkeys(node.inputs) if value in self.trained]


def reduction_s(machine: Machine, mesh: Mesh, kind: str, axes: tuple[str, ...], nbytes: float) -> float:
    """The time to combine a partial value over `axes`, the way the runtime does it."""
    if not axes:
        return 0.0
    combine_s = gather_along_axes_s if kind == "moments" else allreduce_s
    return machine.local.reduce_s + combine_s(machine, mesh, axes, nbytes)


def optimizer_s(graph: Graph, machine: Machine) -> float:
    """The time of an SGD step with momentum: it reads three tensors a parameter and writes two."""
    nbytes = sum(graph.types[name].nbytes for name in trained(graph))
    return (5 * nbytes * machine.local.memory_seconds_per_byte + machine.local.overhead_s) if nbytes else 0.0
