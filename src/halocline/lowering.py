"""Lowering: from a placement follow the instructions of every rank, in an order that overlaps what it can."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Literal

from .gradients import carrying, overwriting
from .graph import Node
from .ops import rule_for
from .ops.rule import AdditiveRule, Reduction, StagedRule
from .placement import Placement
from .program import (
    Bucket,
    Compute,
    Fetch,
    Free,
    Gradient,
    GradientReduce,
    Instruction,
    Program,
    Reduce,
    Start,
    StartAdjoint,
    StartSum,
    Wait,
    WaitAdjoint,
    WaitSum,
)
from .transfer import Transfer

Halo = Literal["auto", "extend", "correct"]
CORRECT_BYTES = 512 << 10  # from this size of a rank's block on, copying it costs more than a few small calls
CORRECT_SHARE = 8  # and from this many times the weights on: each of these calls reads them, and makes their gradient
BUCKET_BYTES = 4 << 20  # gradient sums start when this much is ready: large enough to reach full bandwidth


def lower(placement: Placement, wanted: frozenset[str], halo: Halo = "auto") -> Program:
    """The program of `placement` that leaves gradients for the leaves `wanted` (parameters and inputs of the batch).

    `halo` says how a convolution applies its halo: `extend` copies block and halo into one tensor, `correct` convolves
    the block alone and adds what the halo gives, `auto` takes the second for large blocks. Both are exact.
    """
    return Lowering(placement, wanted, halo).program()


def least_apart_bytes(node: Node) -> int:
    """From which size of a rank's block on its halo stays apart when `node` reads it, if that is left to `auto`."""
    return max(CORRECT_BYTES, CORRECT_SHARE * sum(type.nbytes for type in node.input_types[1:]))


class Lowering:
    """Works out fetches, then the forward and the backward list."""

    def __init__(self, placement: Placement, wanted: frozenset[str], halo: Halo) -> None:
        self.placement, self.graph, self.mesh = placement, placement.graph, placement.mesh
        self.wanted, self.halo = wanted, halo
        self.fetches: dict[str, Fetch] = {}
        self.feeds: dict[str, tuple[str, ...]] = {}
        self.apart: dict[str, str] = {}
        self.buckets = 0
        self.stages = {node.name: self._stages(node) for node in self.graph.nodes}

    def program(self) -> Program:
        self._fetch_all()
        self.apart = self._apart()
        forward, backward = tuple(self._forward()), tuple(self._backward())
        return Program(
            self.placement, self.fetches, self.feeds, self.apart, self._overwrite(), self._differentiable, forward,
            backward,
        )  # fmt: skip

    def _stages(self, node: Node) -> tuple[tuple[Reduction, ...], tuple[Reduction, ...]]:
        rule = rule_for(node)
        return (rule.reductions(node), rule.grad_reductions(node)) if isinstance(rule, StagedRule) else ((), ())

    def _fetch_all(self) -> None:
        shared: dict[tuple[str, Transfer], str] = {}
        readers: dict[str, list[str]] = {}
        for node in self.graph.nodes:
            over = self.placement.over(node)
            reads = [self.placement.reads(node, rank) for rank in range(self.mesh.size)]
            feeds: list[str] = []
            for position, value in enumerate(node.inputs):
                transfer = Transfer(self.placement.layouts[value], tuple(read[position] for read in reads), over)
                if transfer.in_place and (value in self.graph.replicated or not transfer.sum_axes):
                    feeds.append(value)
                    continue
                name = f"{value}>{node.name}"
                while name in readers and shared.get((value, transfer)) is None:
                    name += "'"
                name = shared.setdefault((value, transfer), name)
                self.fetches.setdefault(name, Fetch(name, value, transfer, ()))
                readers.setdefault(name, []).append(node.name)
                feeds.append(name)
            self.feeds[node.name] = tuple(feeds)
        for name, nodes in readers.items():
            self.fetches[name] = replace(self.fetches[name], readers=tuple(dict.fromkeys(nodes)))

    def _apart(self) -> dict[str, str]:
        apart: dict[str, str] = {}
        nodes = {node.name: node for node in self.graph.nodes}
        for name, fetch in self.fetches.items():
            block_bytes = self.graph.types[fetch.value].nbytes // self.mesh.parts(
                self.mesh.ordered(fetch.transfer.owns.axes)
            )
            least = max(least_apart_bytes(nodes[reader]) for reader in fetch.readers)
            large = self.halo == "correct" or (self.halo == "auto" and block_bytes >= least)
            if (
                large
                and not fetch.transfer.local
                and all(self._additive(nodes[reader], fetch) for reader in fetch.readers)
            ):
                apart |= dict.fromkeys(fetch.readers, name)
        return apart

    def _overwrite(self) -> frozenset[str]:
        inputs = {node.name: node.inputs for node in self.graph.nodes}
        return frozenset(name for name in overwriting(self.graph) if self.feeds[name][0] == inputs[name][0])

    def _additive(self, reader: Node, fetch: Fetch) -> bool:
        """Whether `reader` is the sum over boxes of the fetched input, and the boxes are cut along such dims only."""
        rule, transfer = rule_for(reader), fetch.transfer
        if not isinstance(rule, AdditiveRule) or self.feeds[reader.name].index(fetch.name) != 0:
            return False
        dims = set(range(len(transfer.owns.dims))) - set(rule.additive_dims(reader))
        return all(
            transfer.owns.region(rank).intervals[dim] == need.intervals[dim]
            for rank, need in enumerate(transfer.needs)
            for dim in dims
        )

    @cached_property
    def _differentiable(self) -> frozenset[str]:
        """The values that carry a gradient: they depend on a wanted leaf, and an output depends on them."""
        return carrying(self.graph, self.wanted)

    def _forward(self) -> list[Instruction]:
        order = {node.name: position for position, node in enumerate(self.graph.nodes)}
        by_value: dict[str, list[str]] = {}
        for name, fetch in self.fetches.items():
            by_value.setdefault(fetch.value, []).append(name)
        last = self._last_reads()
        kept = {*self.graph.outputs, *self.graph.updates.values(), *self.graph.replicated}
        made: list[Instruction] = []
        started: set[str] = set()
        waited: set[str] = set()

        def start(names: Iterable[str]) -> None:
            made.extend(Start(name) for name in dict.fromkeys(names) if name not in started)
            started.update(names)

        for position, node in enumerate(self.graph.nodes):
            fetches = [name for name in dict.fromkeys(self.feeds[node.name]) if name in self.fetches]
            start(fetches)
            apart = self.apart.get(node.name)
            made += [Wait(name) for name in fetches if name not in waited and name != apart]
            made.append(Compute(node.name))
            if apart is not None:
                made += [Wait(apart)] if apart not in waited else []
                made.append(Compute(node.name, 1))
            waited.update(fetches)
            for stage, reduction in enumerate(self.stages[node.name][0]):
                if axes := self._axes(node, reduction):  # without any, the partial value is the whole one
                    made.append(Reduce(node.name, stage, reduction.kind, axes))
                made.append(Compute(node.name, stage + 1))
            # A far reader's region is fetched just before it is read: fetched early it would only take memory.
            near = [
                name for name in by_value.get(node.name, []) if order[self.fetches[name].readers[0]] <= position + 2
            ]
            start(near)
            gone = [name for name, reader in last.items() if reader == position and name not in kept]
            if gone:
                made.append(Free(tuple(gone)))
        return made

    def _last_reads(self) -> dict[str, int]:
        """For each value and fetch the position of the last node that reads it, a value's through its fetches too."""
        last: dict[str, int] = {}
        for position, node in enumerate(self.graph.nodes):
            last[node.name] = position
            for name in self.feeds[node.name]:
                last[name] = position
                if name in self.fetches:
                    last[self.fetches[name].value] = position
        return last

    def _axes(self, node: Node, reduction: Reduction) -> tuple[str, ...]:
        parts = self.placement.parts[node.name]
        return self.mesh.ordered(
            frozenset(axis for index in reduction.over if index in parts for axis in parts[index].axes)
        )

    def _backward(self) -> list[Instruction]:
        active = [node for node in self.graph.nodes if node.name in self._differentiable]
        first_reader: dict[str, str] = {}  # of each fetch that carries a gradient: the last to add to it
        for node in active:
            for name in self._carried(node):
                first_reader.setdefault(name, node.name)
        leaf_readers = [leaf for node in active for leaf in self._leaves(node)]
        made: list[Instruction] = []
        coming: dict[str, list[str]] = {}  # for each value the adjoints under way to it
        ready: list[tuple[str, tuple[str, ...]]] = []  # leaf gradients that are complete but for their sum
        for node in reversed(active):
            made += [WaitAdjoint(name) for name in coming.pop(node.name, [])]
            made.append(Gradient(node.name))
            for stage, reduction in enumerate(self.stages[node.name][1]):
                if axes := self._axes(node, reduction):
                    made.append(GradientReduce(node.name, stage, reduction.kind, axes))
                made.append(Gradient(node.name, stage + 1))
            complete = [name for name in self._carried(node) if first_reader[name] == node.name]
            if node.name in self.apart:  # the boxes' gradients travel while the own block's is computed
                made += [StartAdjoint(name) for name in complete if name == self.apart[node.name]]
                made.append(Gradient(node.name, 1))
            for name in complete:
                if name in self.fetches:
                    made += [StartAdjoint(name)] if name != self.apart.get(node.name) else []
                    value = self.fetches[name].value
                    if value in self.graph.replicated:
                        made.append(WaitAdjoint(name))
                    else:
                        coming.setdefault(value, []).append(name)
            for leaf in self._leaves(node):
                leaf_readers.remove(leaf)
                if leaf not in leaf_readers and leaf[1]:
                    ready.append(leaf)
                    made += [StartSum(bucket) for bucket in self._full(ready)]
        made += [WaitAdjoint(name) for names in coming.values() for name in names]  # the batch's own gradients
        made += [StartSum(bucket) for bucket in self._full(ready, everything=True)]
        return made + [WaitSum(start.bucket) for start in made if isinstance(start, StartSum)]

    def _carried(self, node: Node) -> tuple[str, ...]:
        """The node's feeds that carry a gradient, once each."""
        feeds = dict.fromkeys(
            name for name, value in zip(self.feeds[node.name], node.inputs) if value in self._differentiable
        )
        return tuple(feeds)

    def _leaves(self, node: Node) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The leaves whose gradient the node adds to, each with the axes over which that is to be summed."""
        over = self.mesh.ordered(self.placement.over(node))
        leaves = dict.fromkeys(value for value in node.inputs if value in self.graph.replicated & self._differentiable)
        return tuple((leaf, over) for leaf in leaves)

    def _full(self, ready: list[tuple[str, tuple[str, ...]]], everything: bool = False) -> list[Bucket]:
        """Takes the large enough buckets (or all) out of `ready`; a bucket has one dtype and one set of axes."""
        groups: dict[tuple[object, tuple[str, ...]], list[str]] = {}
        for name, axes in ready:
            groups.setdefault((self.graph.types[name].dtype, axes), []).append(name)
        full = []
        for (_, axes), names in groups.items():
            if everything or sum(self.graph.types[name].nbytes for name in names) >= BUCKET_BYTES:
                full.append(Bucket(self.buckets, axes, tuple(names)))
                self.buckets += 1
                ready[:] = [leaf for leaf in ready if leaf not in [(name, axes) for name in names]]
        return full
