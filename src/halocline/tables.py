"""`Tables`: makes the planner's `Problem` from a graph, a mesh and a machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .candidates import Group, alike_indices, candidates, groups
from .cost.estimate import reduction_s
from .cost.local_times import LocalCall, LocalTimes
from .cost.machine import Machine
from .cost.movement import beside_s, gradient_share, may_stay_apart, received
from .cost.pairs import Array, Beside, Owners, pair_costs
from .cost.sampled import even_split, output_layout_of, sample_ranks
from .cost.work import Kept, kept, partial_bytes
from .gradients import Manner, carrying, manners, trained, wanted_inputs
from .graph import Graph, Node
from .layout import DimSplit, Layout
from .lowering import BUCKET_BYTES, least_apart_bytes
from .mesh import Mesh
from .ops import rule_for
from .ops.rule import AdditiveRule, Reduction, Rule, StagedRule
from .placement import Split, box
from .problem import Edge, Variable, first_wants
from .region import Region


@dataclass(frozen=True)
class _Fixed:
    """What about a node does not depend on its split."""

    node: Node
    rule: Rule
    wanted: tuple[bool, ...]
    reductions: tuple[tuple[Reduction, bool], ...]  # each with whether it is in the forward pass
    keeps: Kept
    own_itemsize: int
    grads_bytes: int
    batch: tuple[int, ...]
    manner: Manner


@dataclass
class Tables:
    """Makes the variables of a graph, and edges between chosen candidates; what was worked out once is kept."""

    graph: Graph
    mesh: Mesh
    machine: Machine
    times: LocalTimes
    _kinds: dict[object, object] = field(default_factory=dict)
    _kind_of: dict[str, int] = field(default_factory=dict)
    _numbers: dict[object, int] = field(default_factory=dict)

    @cached_property
    def carried(self) -> frozenset[str]:
        return carrying(self.graph, trained(self.graph))

    @cached_property
    def manners(self) -> Mapping[str, Manner]:
        return manners(self.graph)

    @cached_property
    def bucket_bytes(self) -> int:
        """How much is summed at a time: a full bucket, or all gradients if they are less."""
        return min(BUCKET_BYTES, sum(self.graph.types[name].nbytes for name in trained(self.graph)))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        return groups(self.graph)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return sample_ranks(self.mesh)

    @cached_property
    def group_of(self) -> Mapping[str, int]:
        return {node.name: number for number, group in enumerate(self.groups) for node in group.nodes}

    def variables(self) -> tuple[Variable, ...]:
        """Every group with all of its candidates."""
        alike = alike_indices(self.graph)
        known: dict[object, tuple[Split, ...]] = {}
        found = []
        for group in self.groups:
            key = tuple(group.indices.items())
            if key not in known:
                known[key] = tuple(candidates(self.mesh, group.indices, alike))
            found.append(self._variable(group, known[key]))
        return tuple(found)

    def _variable(self, group: Group, splits: tuple[Split, ...]) -> Variable:
        tables = [self._node(node, group, splits) for node in group.nodes]
        seconds, sums, behind, nbytes = (np.sum(columns, axis=0) for columns in zip(*tables))
        return Variable(group, splits, seconds, sums, behind, nbytes)

    def kind(self, node: Node) -> int:
        """A number that two nodes share when they cost the same."""
        if node.name not in self._kind_of:
            leaves = tuple(name in self.graph.replicated for name in node.inputs)
            manner = self.manners[node.name]
            held = (node.name in self.carried, self._holds_own(node), self._reads_batch(node), manner)
            key = (
                node.op, tuple(sorted((key, str(value)) for key, value in node.attrs.items())), node.roles,
                node.input_types, node.type, wanted_inputs(node, self.carried), leaves, held,
            )  # fmt: skip
            self._kind_of[node.name] = self._numbers.setdefault(key, len(self._numbers))
        return self._kind_of[node.name]

    def _reads_batch(self, node: Node) -> tuple[int, ...]:
        return tuple(
            position for position, name in enumerate(node.inputs)
            if name in self.graph.inputs and self.graph.readers[name][0] is node
        )  # fmt: skip

    def _holds_own(self, node: Node) -> bool:
        """Whether the node's own part of its output stays until the backward pass, whoever reads it."""
        if kept(node, wanted_inputs(node, self.carried)).output:
            return True
        readers = self.graph.readers.get(node.name, ())
        inside = [r for r in readers if self.group_of.get(r.name) == self.group_of[node.name]]
        several = len(readers) > 1
        return any(self._keeps(reader, node.name) for reader in (readers if several else inside))

    def _keeps(self, reader: Node, value: str) -> bool:
        holds = kept(reader, wanted_inputs(reader, self.carried)).inputs
        return any(keep for name, keep in zip(reader.inputs, holds) if name == value)

    def parts(self, node: Node, split: Split) -> dict[str, DimSplit]:
        sizes = rule_for(node).signature(node).indices
        return {i: even_split(axes, self.mesh.parts(axes), sizes[i]) for i, axes in split.items() if axes}

    def _node(self, node: Node, group: Group, splits: tuple[Split, ...]) -> tuple[Array, ...]:
        """Seconds, gradient sums, backward seconds and kept bytes of a node under each candidate of its group."""
        key = ("node", self.kind(node), tuple(group.names[node.name].items()), frozen(splits))
        if key not in self._kinds:
            fixed = self._fixed(node)
            rows = [self._under(fixed, group.split_of(node, split)) for split in splits]
            self._kinds[key] = tuple(np.array(column, dtype=np.float64) for column in zip(*rows))
        return self._kinds[key]  # type: ignore[return-value]

    def _under(self, fixed: "_Fixed", split: Split) -> tuple[float, float, float, float]:
        node = fixed.node
        parts, rank = self.parts(node, split), 0  # rank 0 has the largest parts
        at = box(node, {i: dim.parts[self.mesh.part(rank, dim.axes)] for i, dim in parts.items()})
        reads, writes = fixed.rule.reads(node, at), fixed.rule.writes(node, at)
        forward, backward = self.times.seconds(LocalCall(node, at, reads, writes, fixed.wanted, fixed.manner))
        stages = moving = 0.0
        held = float(writes.size * fixed.own_itemsize)
        for reduction, is_forward in fixed.reductions:
            over = frozenset(axis for index in reduction.over if index in parts for axis in parts[index].axes)
            if over:
                nbytes = partial_bytes(node, writes, is_forward)
                stages += reduction_s(self.machine, self.mesh, reduction.kind, self.mesh.ordered(over), nbytes)
        axes = self.mesh.ordered(frozenset(axis for axes in split.values() for axis in axes))
        sums, packing = gradient_share(self.machine, self.mesh, axes, fixed.grads_bytes, self.bucket_bytes)
        for position in fixed.batch:
            seconds, kept_bytes = self._batch(node, position, split, forward)
            moving += seconds
            held += kept_bytes * fixed.keeps.inputs[position]
        return forward + backward + stages + moving + packing, sums, backward + stages / 2, held

    def _fixed(self, node: Node) -> "_Fixed":
        rule, wanted = rule_for(node), wanted_inputs(node, self.carried)
        reductions: list[tuple[Reduction, bool]] = []
        if isinstance(rule, StagedRule):
            reductions += [(reduction, True) for reduction in rule.reductions(node)]
            if node.name in self.carried:
                reductions += [(reduction, False) for reduction in rule.grad_reductions(node)]
        leaves = {name for name in node.inputs if name in self.graph.replicated & self.carried and any(wanted)}
        holds = kept(node, wanted)
        itemsize = node.type.dtype.itemsize * self._holds_own(node) + holds.extra_bytes
        grads = sum(self.graph.types[name].nbytes for name in leaves)
        return _Fixed(
            node,
            rule,
            wanted,
            tuple(reductions),
            holds,
            itemsize,
            grads,
            self._reads_batch(node),
            self.manners[node.name],
        )

    def _batch(self, node: Node, position: int, split: Split, forward_s: float) -> tuple[float, float]:
        """What a first reader fetches beyond its own part of a batch tensor, and the bytes it then holds of it."""
        type = node.input_types[position]
        wants = first_wants(self.graph, node.inputs[position], {node.name: split})
        dims = [even_split(wants.get(d, ()), self.mesh.parts(wants.get(d, ())), s) for d, s in enumerate(type.shape)]
        layout, worst, held = Layout(self.mesh, tuple(dims)), 0.0, 0.0
        for rank in self.ranks:
            need = self.needs(node, split, rank)[position]
            there = received(self.machine, layout, need, rank, type.dtype.itemsize)
            apart = there.messages and may_stay_apart(self.mesh, node, position, layout, need, layout.region(rank))
            worst = max(worst, beside_s(self.machine, there, forward_s) if apart else there.seconds)
            held = max(held, float(need.size * type.dtype.itemsize))
        return worst, held

    def needs(self, node: Node, split: Split, rank: int) -> tuple[Region, ...]:
        """What `rank` reads of each input of the node under `split`."""
        key = ("needs", self.kind(node), tuple(split.items()), rank)
        if key not in self._kinds:
            parts = self.parts(node, split)
            at = box(node, {i: dim.parts[self.mesh.part(rank, dim.axes)] for i, dim in parts.items()})
            self._kinds[key] = rule_for(node).reads(node, at)
        return self._kinds[key]  # type: ignore[return-value]

    def edges(self, variables: Sequence[Variable]) -> tuple[Edge, ...]:
        """What moves between every two groups, for the candidates that `variables` have."""
        sums: dict[tuple[int, int], tuple[Array, Array]] = {}
        for node in self.graph.nodes:
            target = self.group_of.get(node.name)
            if target is None:
                continue
            for position, value in enumerate(node.inputs):
                source, producer = self._source(value)
                if source is None or source == target or node.inputs.index(value) != position:
                    continue
                found = self._pair(producer, value, variables[source], node, position, variables[target])
                if source > target:  # a batch tensor whose first reader comes later in no case; kept for symmetry
                    source, target, found = target, source, (found[0].T, found[1].T)
                key = (source, target)
                before = sums.get(key, (np.zeros_like(found[0]), np.zeros_like(found[1])))
                sums[key] = before[0] + found[0], before[1] + found[1]
        return tuple(Edge(a, b, seconds, nbytes) for (a, b), (seconds, nbytes) in sorted(sums.items()))

    def _source(self, value: str) -> tuple[int | None, Node | None]:
        """The group that decides a value's layout, and the node that makes it (None: it comes with the batch)."""
        if value in self.graph.inputs:
            return self.group_of[self.graph.readers[value][0].name], None
        if value not in self.group_of:
            return None, None
        return self.group_of[value], next(node for node in self._nodes[self.group_of[value]] if node.name == value)

    @cached_property
    def _nodes(self) -> list[tuple[Node, ...]]:
        return [group.nodes for group in self.groups]

    def _pair(
        self, producer: Node | None, value: str, source: Variable, reader: Node, position: int, target: Variable
    ) -> tuple[Array, Array]:
        own = tuple(source.group.names[producer.name].items()) if producer else (value,)
        key = (
            "pair", self.kind(producer) if producer else value, own, frozen(source.splits),
            self.kind(reader), position, tuple(target.group.names[reader.name].items()), frozen(target.splits),
            value in self.carried, len(self.graph.readers[value]) > 1,
        )  # fmt: skip
        if key not in self._kinds:
            self._kinds[key] = self._pair_tables(producer, value, source, reader, position, target)
        return self._kinds[key]  # type: ignore[return-value]

    def _pair_tables(
        self, producer: Node | None, value: str, source: Variable, reader: Node, position: int, target: Variable
    ) -> tuple[Array, Array]:
        type = reader.input_types[position]
        layouts = [self._layout(producer, value, source.group, split) for split in source.splits]
        names = [target.group.split_of(reader, split) for split in target.splits]
        over = [frozenset(axis for axes in split.values() for axis in axes) for split in names]
        carries = value in self.carried and reader.name in self.carried
        seconds = np.zeros((len(layouts), len(names)))
        nbytes = np.zeros_like(seconds)
        held = kept(reader, wanted_inputs(reader, self.carried)).inputs[position]
        own_kept = self._holds_own(producer) if producer else True
        beside = self._beside(reader, position, names)
        for rank in self.ranks:
            needs = [self.needs(reader, split, rank)[position] for split in names]
            owners = Owners(self.machine, layouts, rank, type.dtype.itemsize)
            pairs = pair_costs(owners, needs, over, carries, beside)
            seconds = np.maximum(seconds, pairs.there_s + pairs.back_s)
            if held:
                sizes = np.array([need.size * type.dtype.itemsize for need in needs], dtype=np.float64)
                inside = np.zeros_like(nbytes) if own_kept else owners.sizes[:, None] + np.zeros_like(nbytes)
                boxes = inside + sizes[None, :] - pairs.shared_bytes
                fetched = np.where(pairs.apart, boxes, sizes[None, :])
                nbytes = np.maximum(nbytes, np.where(pairs.local, inside, fetched))
        return seconds, nbytes

    def _beside(self, reader: Node, position: int, splits: Sequence[Split]) -> Beside | None:
        """The reader's times by itself, if it can add its halo apart."""
        rule = rule_for(reader)
        if position or not isinstance(rule, AdditiveRule):
            return None
        wanted, found = wanted_inputs(reader, self.carried), []
        for split in splits:
            parts = self.parts(reader, split)
            at = box(reader, {i: dim.parts[self.mesh.part(0, dim.axes)] for i, dim in parts.items()})
            call = LocalCall(reader, at, rule.reads(reader, at), rule.writes(reader, at), wanted)
            found.append(self.times.seconds(call))
        forward, backward = (np.array(column, dtype=np.float64) for column in zip(*found))
        return Beside(tuple(rule.additive_dims(reader)), forward, backward, least_apart_bytes(reader))

    def _layout(self, producer: Node | None, value: str, group: Group, split: Split) -> Layout:
        if producer is None:
            reader = self.graph.readers[value][0]
            wants = first_wants(self.graph, value, {reader.name: group.split_of(reader, split)})
            shape = self.graph.types[value].shape
            dims = [even_split(wants.get(d, ()), self.mesh.parts(wants.get(d, ())), s) for d, s in enumerate(shape)]
            return Layout(self.mesh, tuple(dims))
        own = group.split_of(producer, split)
        return self._output(producer, own)

    def _output(self, producer: Node, split: Split) -> Layout:
        """The layout of the output; equal dims are one object, so that they are compared fast."""
        signature = rule_for(producer).signature(producer)
        dims = []
        for dim, index in enumerate(signature.output):
            axes = split.get(index, ()) if index is not None else ()
            key = ("dim", self.kind(producer), dim, axes)
            if key not in self._kinds:
                chosen = {index: axes} if index is not None and axes else {}
                layout = output_layout_of(self.mesh, producer, signature, self.parts(producer, chosen))
                self._kinds[key] = layout.dims[dim]
            dims.append(self._kinds[key])
        return Layout(self.mesh, tuple(dims))  # type: ignore[arg-type]


def frozen(splits: Sequence[Split]) -> tuple[tuple[tuple[str, tuple[str, ...]], ...], ...]:
    """Splits in a form that can be a key."""
    return tuple(tuple(split.items()) for split in splits)
