"""`Program`: two lists of instructions, forward and backward, the same on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from .graph import Graph, Node
from .ops import rule_for
from .ops.rule import Reduction, StagedRule
from .placement import Placement
from .transfer import Transfer

BUCKET_BYTES = 4 << 20  # gradient sums start when this much is ready: large enough to reach full bandwidth


@dataclass(frozen=True)
class Fetch:
    """A value brought to the region that its `readers` need of it; readers with equal needs share one."""

    name: str
    value: str
    transfer: Transfer
    readers: tuple[str, ...]


@dataclass(frozen=True)
class Start:
    """Begin a fetch: send what others need of the value, post what comes in."""

    fetch: str


@dataclass(frozen=True)
class Wait:
    """End a fetch: the region needed is complete."""

    fetch: str


@dataclass(frozen=True)
class Compute:
    """Run a node on this rank's part, up to its next reduction or to its end."""

    node: str
    stage: int = 0


@dataclass(frozen=True)
class Reduce:
    """Combine a node's partial value over mesh axes."""

    node: str
    stage: int
    kind: str
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Free:
    """Forget values and fetched regions that nothing in the list reads any more."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Gradient(Compute):
    """Run a node's backward pass, up to its next reduction or to its end."""


@dataclass(frozen=True)
class GradientReduce(Reduce):
    """Combine a partial value of a node's backward pass."""


@dataclass(frozen=True)
class StartAdjoint:
    """Begin to send a fetched region's gradient back to the owners."""

    fetch: str


@dataclass(frozen=True)
class WaitAdjoint:
    """Add what came in to the gradient of the value that was fetched."""

    fetch: str


@dataclass(frozen=True)
class Bucket:
    """Gradients of replicated leaves that are summed over `axes` in one allreduce."""

    number: int
    axes: tuple[str, ...]
    leaves: tuple[str, ...]


@dataclass(frozen=True)
class StartSum:
    bucket: Bucket


@dataclass(frozen=True)
class WaitSum:
    bucket: Bucket


Instruction: TypeAlias = (
    Start | Wait | Compute | Reduce | Free | Gradient | GradientReduce | StartAdjoint | WaitAdjoint | StartSum | WaitSum
)


@dataclass(frozen=True)
class Program:
    """What every rank does in a step. `feeds` gives, for each node, the fetch that feeds each of its inputs."""

    placement: Placement
    fetches: Mapping[str, Fetch]
    feeds: Mapping[str, tuple[str, ...]]
    differentiable: frozenset[str]
    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]

    @property
    def graph(self) -> Graph:
        return self.placement.graph

    def __str__(self) -> str:
        return "\n".join(["forward", *map(self._line, self.forward), "backward", *map(self._line, self.backward)])

    def _line(self, instruction: Instruction) -> str:
        name = type(instruction).__name__
        match instruction:
            case Start(fetch) | Wait(fetch) | StartAdjoint(fetch) | WaitAdjoint(fetch):
                return f"  {name} {fetch}"
            case Reduce(node, stage, kind, axes):
                return f"  {name} {node}.{stage} {kind} over {'*'.join(axes) or 'nothing'}"
            case Compute(node, stage):
                return f"  {name} {node}.{stage}"
            case Free(names):
                return f"  {name} {' '.join(names)}"
            case StartSum(bucket) | WaitSum(bucket):
                return f"  {name} {bucket.number} over {'*'.join(bucket.axes)}: {' '.join(bucket.leaves)}"


def lower(placement: Placement, wanted: frozenset[str]) -> Program:
    """The program of `placement` that leaves gradients for the leaves `wanted` (parameters and inputs of the batch)."""
    return _Lowering(placement, wanted).program()


class _Lowering:
    def __init__(self, placement: Placement, wanted: frozenset[str]) -> None:
        self.placement, self.graph, self.mesh = placement, placement.graph, placement.mesh
        self.wanted = wanted
        self.fetches: dict[str, Fetch] = {}
        self.feeds: dict[str, tuple[str, ...]] = {}
        self.buckets = 0
        self.stages = {node.name: self._stages(node) for node in self.graph.nodes}

    def program(self) -> Program:
        self._fetch_all()
        differentiable = self._differentiable
        return Program(
            self.placement, self.fetches, self.feeds, differentiable, tuple(self._forward()), tuple(self._backward())
        )

    def _stages(self, node: Node) -> tuple[tuple[Reduction, ...], tuple[Reduction, ...]]:
        rule = rule_for(node)
        return (rule.reductions(node), rule.grad_reductions(node)) if isinstance(rule, StagedRule) else ((), ())

    def _fetch_all(self) -> None:
        shared: dict[tuple[str, Transfer], str] = {}
        readers: dict[str, list[str]] = {}
        for node in self.graph.nodes:
            over = self.placement.over(node)
            reads = [self.placement.reads(node, rank) for rank in range(self.mesh.size)]
            feeds = []
            for position, value in enumerate(node.inputs):
                transfer = Transfer(self.placement.layouts[value], tuple(read[position] for read in reads), over)
                key = shared.get(
                    (value, transfer),
                    f"{value}>{node.name}" + (f".{position}" if value in node.inputs[:position] else ""),
                )
                shared[value, transfer] = key
                self.fetches.setdefault(key, Fetch(key, value, transfer, ()))
                readers.setdefault(key, []).append(node.name)
                feeds.append(key)
            self.feeds[node.name] = tuple(feeds)
        for key, names in readers.items():
            fetch = self.fetches[key]
            self.fetches[key] = Fetch(key, fetch.value, fetch.transfer, tuple(dict.fromkeys(names)))

    @cached_property
    def _differentiable(self) -> frozenset[str]:
        """The values that carry a gradient: they depend on a wanted leaf, and an output depends on them."""
        depends = set(self.wanted)
        for node in self.graph.nodes:
            if node.type.differentiable and any(name in depends for name in node.inputs):
                depends.add(node.name)
        used = set(self.graph.outputs)
        for node in reversed(self.graph.nodes):
            if node.name in used and node.name in depends:
                used.update(name for name in node.inputs if name in depends)
        return frozenset(depends & used)

    def _forward(self) -> list[Instruction]:
        order = {node.name: position for position, node in enumerate(self.graph.nodes)}
        waiting = {key: order[fetch.readers[0]] for key, fetch in self.fetches.items()}
        by_value: dict[str, list[str]] = {}
        for key, fetch in self.fetches.items():
            by_value.setdefault(fetch.value, []).append(key)
        last_read = {key: order[fetch.readers[-1]] for key, fetch in self.fetches.items()}
        kept = {*self.graph.outputs, *self.graph.updates.values()}
        made: list[Instruction] = []
        started: set[str] = set()

        def start(keys: list[str]) -> None:
            made.extend(Start(key) for key in keys if key not in started)
            started.update(keys)

        for position, node in enumerate(self.graph.nodes):
            # A far reader's region is fetched just before it is read: fetched early it would only take memory.
            start([key for key in dict.fromkeys(self.feeds[node.name])])
            made += [Wait(key) for key in dict.fromkeys(self.feeds[node.name]) if waiting.pop(key, None) is not None]
            reductions = self.stages[node.name][0]
            made.append(Compute(node.name))
            for stage, reduction in enumerate(reductions):
                made.append(Reduce(node.name, stage, reduction.kind, self._axes(node, reduction)))
                made.append(Compute(node.name, stage + 1))
            start([key for key in by_value.get(node.name, []) if order[self.fetches[key].readers[0]] <= position + 2])
            gone = [key for key in dict.fromkeys(self.feeds[node.name]) if last_read[key] == position]
            values = {self.fetches[key].value for key in gone}
            gone += [
                value
                for value in sorted(values - kept - self.graph.replicated)
                if all(last_read[key] <= position for key in by_value[value])
            ]
            if gone:
                made.append(Free(tuple(gone)))
        return made

    def _axes(self, node: Node, reduction: Reduction) -> tuple[str, ...]:
        parts = self.placement.parts[node.name]
        return self.mesh.ordered(
            frozenset(axis for index in reduction.over if index in parts for axis in parts[index].axes)
        )

    def _backward(self) -> list[Instruction]:
        differentiable, leaves = self._differentiable, self.graph.replicated
        active = [node for node in self.graph.nodes if node.name in differentiable]
        active_names = {node.name for node in active}
        carried = {
            key: [name for name in fetch.readers if name in active_names]
            for key, fetch in self.fetches.items()
            if fetch.value in differentiable
        }
        made: list[Instruction] = []
        open_adjoints: dict[str, list[str]] = {}
        ready: list[tuple[str, tuple[str, ...]]] = []  # leaf gradients that are complete but for their sum
        pending = self._leaf_readers(carried)
        for node in reversed(active):
            made += [WaitAdjoint(key) for key in open_adjoints.pop(node.name, [])]
            made.append(Gradient(node.name))
            for stage, reduction in enumerate(self.stages[node.name][1]):
                made.append(GradientReduce(node.name, stage, reduction.kind, self._axes(node, reduction)))
                made.append(Gradient(node.name, stage + 1))
            for key in dict.fromkeys(self.feeds[node.name]):
                if key not in carried or carried[key][0] != node.name:
                    continue
                fetch = self.fetches[key]
                made.append(StartAdjoint(key))
                if fetch.value not in leaves:
                    open_adjoints.setdefault(fetch.value, []).append(key)
                    continue
                made.append(WaitAdjoint(key))
                leaf = (fetch.value, fetch.transfer.sum_axes)
                pending[leaf] -= 1
                if not pending[leaf] and leaf[1]:
                    ready.append(leaf)
                    made += [StartSum(bucket) for bucket in self._full(ready)]
        for keys in open_adjoints.values():  # inputs of the batch that want a gradient
            made += [WaitAdjoint(key) for key in keys]
        made += [StartSum(bucket) for bucket in self._full(ready, everything=True)]
        return made + [WaitSum(made_.bucket) for made_ in made if isinstance(made_, StartSum)]

    def _leaf_readers(self, carried: Mapping[str, list[str]]) -> dict[tuple[str, tuple[str, ...]], int]:
        """For each leaf and set of axes its gradient is summed over, the number of fetches that add to it."""
        count: dict[tuple[str, tuple[str, ...]], int] = {}
        for key in carried:
            fetch = self.fetches[key]
            if fetch.value in self.graph.replicated:
                leaf = (fetch.value, fetch.transfer.sum_axes)
                count[leaf] = count.get(leaf, 0) + 1
        return count

    def _full(self, ready: list[tuple[str, tuple[str, ...]]], everything: bool = False) -> list[Bucket]:
        """Takes the buckets out of `ready` that are large enough, or all. One bucket has one dtype and one set of axes."""
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
