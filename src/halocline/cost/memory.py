"""The memory that a step takes on a rank, by following what the program allocates and frees."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..gradients import Manner, manners, trained, wanted_inputs
from ..graph import Graph, Node
from ..lowering import BUCKET_BYTES
from .movement import may_stay_apart
from .sampled import Sampled
from .work import VIEWS, Kept, kept

BUCKET = "bucket of gradients"
OPTIMIZER_COPIES = 1  # SGD with momentum; Adam holds two


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest of the sample ranks.

    `kept_bytes` are alive when the backward pass begins, `passing_bytes` is what the worst moment has beyond them
    (values on their way, halos, gradients of activations), `gradients_bytes` what the parameters' gradients add to the
    worst moment: they come as activations go, `largest` the values that keep most, with their bytes. The batch counts
    once: `Step.scatter` gives it in the memory format that the program wants.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    kept_bytes: int
    passing_bytes: int
    largest: tuple[tuple[str, int], ...] = ()

    @cached_property
    def total_bytes(self) -> int:
        return (
            self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.kept_bytes + self.passing_bytes
        )


@dataclass
class _Heap:
    """Bytes by block, with how many names hold each block; the peak of their sum."""

    sizes: dict[str, int] = field(default_factory=dict)
    holders: dict[str, int] = field(default_factory=dict)
    now: int = 0
    peak: int = 0

    def hold(self, block: str, nbytes: int) -> None:
        if block not in self.holders:
            self.holders[block], self.sizes[block] = 0, nbytes
            self.now += nbytes
            self.peak = max(self.peak, self.now)
        self.holders[block] += 1

    def drop(self, block: str) -> None:
        if block not in self.holders:
            return
        self.holders[block] -= 1
        if not self.holders[block]:
            self.now -= self.sizes[block]
            del self.holders[block], self.sizes[block]


def persistent_bytes(graph: Graph) -> tuple[int, int]:
    """Bytes of parameters (with buffers and constants), and of the optimizer's state."""
    own = sum(graph.types[name].nbytes for name in graph.replicated)
    grads = sum(graph.types[name].nbytes for name in trained(graph))
    return own, OPTIMIZER_COPIES * grads


def memory_of(sampled: Sampled, carried: frozenset[str]) -> Memory:
    """What the fullest of the sample ranks needs."""
    own, state = persistent_bytes(sampled.graph)
    walks = [_Walk(sampled, carried, rank) for rank in sampled.ranks[:1] + sampled.ranks[-1:]]
    fullest = max(((*walk.run(), walk) for walk in walks), key=lambda found: found[1])
    kept_bytes, peak, largest, walk = fullest
    without = walk.peak_without_gradients
    return Memory(own, peak - without, state, kept_bytes, max(0, without - kept_bytes), largest)


class _Walk:
    """Goes through a step on one rank. A block is a value's own region, or a region fetched for a reader."""

    def __init__(self, sampled: Sampled, carried: frozenset[str], rank: int) -> None:
        self.sampled, self.graph, self.carried, self.rank = sampled, sampled.graph, carried, rank
        self.heap = _Heap()
        self.leaf_bytes = self.peak_without_gradients = 0
        self.block: dict[str, str] = {}  # value -> the block that holds its own region
        self.kept: dict[str, list[str]] = {}
        self.feeds: dict[str, list[tuple[str, int]]] = {}  # node -> block and bytes of each input

    def run(self) -> tuple[int, int, tuple[tuple[str, int], ...]]:
        last: dict[str, int] = {}
        for position, node in enumerate(self.graph.nodes):
            for name in (*node.inputs, node.name):
                last[name] = position
        for name in self.graph.inputs:
            self._own(name, name)
        ending: dict[int, list[str]] = {}
        for name, position in last.items():
            ending.setdefault(position, []).append(name)
        for position, node in enumerate(self.graph.nodes):
            self._forward(node)
            for name in ending.get(position, []):
                if name not in self.graph.replicated and name not in self.graph.outputs:
                    self.heap.drop(self.block[name])
        kept_bytes = self.heap.now
        largest = sorted(self.heap.sizes.items(), key=lambda item: (-item[1], item[0]))[:8]
        self.peak_without_gradients = self.heap.peak
        for node in reversed(self.graph.nodes):
            self._backward(node)
        self.heap.peak = max(self.heap.peak, self.heap.now)
        return kept_bytes, self.heap.peak, tuple(largest)

    def _bytes(self, value: str) -> int:
        type = self.graph.types[value]
        return self.sampled.layouts[value].region(self.rank).size * type.dtype.itemsize

    def _own(self, name: str, block: str) -> None:
        self.block[name] = block
        self.heap.hold(block, self._bytes(name))

    def _forward(self, node: Node) -> None:
        wanted = wanted_inputs(node, self.carried)
        holds: Kept = kept(node, wanted)
        feeds: list[tuple[str, int]] = []
        fetched: list[str] = []
        boxes: list[str] = []
        reads = self.sampled.reads[node.name, self.rank]
        for position, (value, need, type) in enumerate(zip(node.inputs, reads, node.input_types)):
            size = need.size * type.dtype.itemsize
            own = self.sampled.layouts[value].region(self.rank)
            if value in self.graph.replicated:
                feeds.append(("", size))
            elif own.holds(need):
                feeds.append((self.block[value], size))
            elif may_stay_apart(self.sampled.mesh, node, position, self.sampled.layouts[value], need, own):
                block = f"halo of {value} for {node.name}"
                self.heap.hold(block, size - own.meet(need).size * type.dtype.itemsize)
                fetched.append(block)
                boxes.append(block)
                feeds.append((self.block[value], size))
            else:
                block = f"{value} for {node.name}"
                self.heap.hold(block, size)
                fetched.append(block)
                feeds.append((block, size))
        self.feeds[node.name] = feeds
        if feeds and feeds[0][0] and (node.op in VIEWS or self._in_place(node, feeds[0][0])):
            self._own(node.name, feeds[0][0])
        else:
            self._own(node.name, node.name)
        keeps = [block for (block, _), keep in zip(feeds, holds.inputs) if keep and block]
        keeps += [self.block[node.name]] if holds.output else []
        keeps += boxes if any(holds.inputs[:1]) else []
        for block in keeps:
            self.heap.hold(block, 0)
        if holds.extra_bytes:
            block = f"indices of {node.name}"
            elements = self.sampled.writes[node.name, self.rank].size
            self.heap.hold(block, elements * holds.extra_bytes)
            keeps.append(block)
        self.kept[node.name] = keeps
        for block in fetched:
            self.heap.drop(block)

    def _leaf_gradients(self, node: Node) -> None:
        """The gradients of the node's parameters come to stay; those to be summed over ranks move to a bucket."""
        for leaf, want in zip(node.inputs, wanted_inputs(node, self.carried)):
            if want and leaf in self.graph.replicated and f"gradient of {leaf}" not in self.heap.holders:
                nbytes = self.graph.types[leaf].nbytes
                self.heap.hold(f"gradient of {leaf}", nbytes)
                self.leaf_bytes += nbytes
                if self.sampled.over(node) and self.heap.sizes.get(BUCKET, 0) < BUCKET_BYTES:
                    self._grow_bucket(nbytes)

    def _grow_bucket(self, nbytes: int) -> None:
        """For a moment a bucket's gradients are there twice; how large that gets shows as they come."""
        before = self.heap.sizes.get(BUCKET, 0)
        self.heap.drop(BUCKET)
        self.heap.hold(BUCKET, before + nbytes)
        self.leaf_bytes += nbytes

    def _in_place(self, node: Node, block: str) -> bool:
        return self.manners[node.name].overwrite and block == self.block[node.inputs[0]]

    @cached_property
    def manners(self) -> Mapping[str, Manner]:
        return manners(self.graph)

    def _backward(self, node: Node) -> None:
        """The gradient of the output is there; those of the inputs come, then what was kept and the first go."""
        if node.name not in self.carried:
            return
        grad = f"gradient of {node.name}"
        if grad not in self.heap.holders:
            self.heap.hold(grad, self._bytes(node.name))
        if self.manners[node.name].then:  # the input's gradient comes in place of it
            self.heap.drop(grad)
        for value, (_, size), want in zip(node.inputs, self.feeds[node.name], wanted_inputs(node, self.carried)):
            if want and value not in self.graph.replicated:
                made = f"gradient of {value} from {node.name}"
                if node.op not in VIEWS and not self.manners[node.name].then:
                    self.heap.hold(made, size)
                if f"gradient of {value}" not in self.heap.holders:
                    if made in self.heap.sizes and size == self._bytes(value):
                        self.heap.drop(made)
                    self.heap.hold(f"gradient of {value}", self._bytes(value))
                self.heap.drop(made)
        self._leaf_gradients(node)
        self.peak_without_gradients = max(self.peak_without_gradients, self.heap.now - self.leaf_bytes)
        self.heap.drop(grad)
        for block in self.kept[node.name]:
            self.heap.drop(block)


def consumers(graph: Graph, memory: Memory) -> Mapping[str, int]:
    """The values that keep most, named by where they come from, with their bytes."""
    nodes = {node.name: node for node in graph.nodes}
    named: dict[str, int] = {}
    for block, size in memory.largest:
        node = nodes.get(block.split(" ")[-1])
        named[node.where() if node else f"batch tensor `{block}`"] = size
    return named
