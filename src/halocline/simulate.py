"""`simulate`: the program of a plan as discrete events on a `Machine`, with links that ranks share.

Every rank has a compute stream and a port on each level of the interconnect; ranks that share a link wait for each
other there. At many ranks only the nodes of a few sample ranks are followed; a peer beyond them is taken to do at each
moment what the followed rank does itself, as it runs the same program.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from .cost.collective import allreduce_s
from .cost.estimate import optimizer_s, reduction_s
from .cost.local_times import LocalCall, LocalTimes
from .cost.machine import Machine
from .cost.movement import CALLS_APART, packing_s
from .cost.sampled import sample_ranks
from .cost.work import partial_bytes
from .gradients import manners, trained, wanted_inputs
from .graph import Graph, Node
from .ops import rule_for
from .placement import Plan
from .program import (
    Compute,
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
from .sampled_program import sampled_program
from .transfer import Messages, Transfer

FOLLOWED = 64  # up to this many ranks every one is followed


@dataclass(frozen=True)
class Event:
    """Something that a rank or its link did: from `start_s` on for `seconds`."""

    rank: int
    stream: str  # "compute", "messages" or "sums"
    name: str
    start_s: float
    seconds: float


@dataclass(frozen=True)
class Simulated:
    """A step that was simulated: its time on the slowest rank, and what every followed rank did when."""

    seconds: float
    ranks: tuple[int, ...]
    events: tuple[Event, ...]

    def busy_s(self, stream: str) -> float:
        """For how long the stream of the slowest rank was busy."""
        last = max(self.ranks, key=lambda rank: sum(e.seconds for e in self.events if e.rank == rank))
        return sum(e.seconds for e in self.events if e.rank == last and e.stream == stream)


def simulate(graph: Graph, plan: Plan, machine: Machine, times: LocalTimes) -> Simulated:
    """A training step of `graph` under `plan` on `machine`, event by event."""
    return _Simulation(graph, plan, machine, times).run()


@dataclass
class _Rank:
    """One followed rank: its clock, and what it waits for."""

    clock: float = 0.0
    posted: dict[tuple[str, bool], float] = field(default_factory=dict)
    sums: dict[int, float] = field(default_factory=dict)
    sums_free: float = 0.0


class _Simulation:
    def __init__(self, graph: Graph, plan: Plan, machine: Machine, times: LocalTimes) -> None:
        self.graph, self.mesh, self.machine, self.times = graph, plan.mesh, machine, times
        self.ranks = followed(machine, plan)
        self.program: Program = sampled_program(graph, plan, self.ranks, trained(graph))
        self.state = {rank: _Rank() for rank in self.ranks}
        self.ports: dict[tuple[int, str, int], float] = {}  # level, "in" or "out", shared link -> free from
        self.events: list[Event] = []
        self.nodes = {node.name: node for node in graph.nodes}
        self.known: dict[tuple[str, int], tuple[float, float]] = {}
        self.manners = manners(graph)
        self.local = machine.local

    def run(self) -> Simulated:
        for instruction in (*self.program.forward, *self.program.backward):
            self._do(instruction)
        for rank in self.ranks:
            self._spend(rank, optimizer_s(self.graph, self.machine), "optimizer")
        return Simulated(max(state.clock for state in self.state.values()), self.ranks, tuple(self.events))

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case Reduce(node, stage, kind, axes):
                self._reduce(node, kind, axes, not isinstance(instruction, GradientReduce))
            case Compute(node, stage):
                for rank in self.ranks:
                    self._compute(rank, self.nodes[node], stage, isinstance(instruction, Gradient))
            case Start(fetch):
                self._start(fetch, False)
            case StartAdjoint(fetch):
                self._start(fetch, True)
            case Wait(fetch):
                self._wait(fetch, False)
            case WaitAdjoint(fetch):
                self._wait(fetch, True)
            case StartSum(bucket):
                self._start_sum(bucket.number, bucket.axes, bucket.leaves)
            case WaitSum(bucket):
                for rank in self.ranks:
                    state = self.state[rank]
                    state.clock = max(state.clock, state.sums[bucket.number])

    def _spend(self, rank: int, seconds: float, name: str, stream: str = "compute") -> None:
        if seconds > 0:
            self.events.append(Event(rank, stream, name, self.state[rank].clock, seconds))
            self.state[rank].clock += seconds

    def _seconds(self, node: Node, rank: int) -> tuple[float, float]:
        if (node.name, rank) not in self.known:
            placement, rule = self.program.placement, rule_for(node)
            at = placement.at(node, rank)
            wanted = wanted_inputs(node, self.program.differentiable)
            call = LocalCall(node, at, rule.reads(node, at), rule.writes(node, at), wanted, self.manners[node.name])
            self.known[node.name, rank] = self.times.seconds(call)
        return self.known[node.name, rank]

    def _compute(self, rank: int, node: Node, stage: int, backward: bool) -> None:
        whole = self._seconds(node, rank)[backward]
        apart = self.program.apart.get(node.name)
        name = f"{node.op} {node.origin.module}{' backward' if backward else ''}"
        if apart is not None:  # the own block, and the halo boxes, which come after it forward and before it backward
            boxes = sum(len(regions) for _, regions in self._route(apart, rank, False)[1])
            extra = CALLS_APART * boxes * self.local.overhead_s / 2
            is_own = (stage == 0) != backward
            self._spend(rank, whole if is_own else extra, name)
            return
        stages = self.program_stages(node, backward)
        self._spend(rank, whole / stages, name)

    def program_stages(self, node: Node, backward: bool) -> int:
        """Into how many parts the node's computation is cut by its sums."""
        return self._stages.get((node.name, backward), 1)

    @cached_property
    def _stages(self) -> Mapping[tuple[str, bool], int]:
        found: dict[tuple[str, bool], int] = {}
        for step in (*self.program.forward, *self.program.backward):
            if isinstance(step, Compute):
                key = step.node, isinstance(step, Gradient)
                found[key] = max(found.get(key, 1), step.stage + 1)
        return found

    def _route(self, fetch: str, rank: int, adjoint: bool) -> tuple[Messages, Messages]:
        key = (fetch, rank, adjoint)
        if key not in self.routes:
            transfer = self.program.fetches[fetch].transfer
            route = transfer.adjoint(rank) if adjoint else transfer.route(rank)
            self.routes[key] = route.sends, route.recvs
        return self.routes[key]

    @cached_property
    def routes(self) -> dict[tuple[str, int, bool], tuple[Messages, Messages]]:
        return {}

    def _itemsize(self, fetch: str) -> int:
        return self.graph.types[self.program.fetches[fetch].value].dtype.itemsize

    def _start(self, fetch: str, adjoint: bool) -> None:
        for rank in self.ranks:
            sends, _ = self._route(fetch, rank, adjoint)
            nbytes = self._bytes(fetch, sends)
            packing = self.local.overhead_s * len(sends) + 2 * nbytes * self.local.memory_seconds_per_byte
            self._spend(rank, packing, f"pack {fetch}")
            self.state[rank].posted[fetch, adjoint] = self.state[rank].clock

    def _bytes(self, fetch: str, messages: Messages) -> int:
        return self._itemsize(fetch) * sum(box.size for _, boxes in messages for box in boxes)

    def _wait(self, fetch: str, adjoint: bool) -> None:
        transfer, itemsize = self.program.fetches[fetch].transfer, self._itemsize(fetch)
        apart = fetch in self.program.apart.values()
        for rank in self.ranks:
            state = self.state[rank]
            _, recvs = self._route(fetch, rank, adjoint)
            arrived = latest = state.posted[fetch, adjoint]
            moving = 0.0
            for peer, boxes in recvs:
                sent = self.state[peer].posted[fetch, adjoint] if peer in self.state else arrived
                nbytes = itemsize * sum(box.size for box in boxes)
                latest = max(latest, sent)
                done, took = self._message(peer, rank, sent, nbytes, fetch)
                arrived, moving = max(arrived, done), moving + took
            if recvs:
                beside = max(state.clock, arrived)
                after = max(state.clock, latest) + moving
                state.clock = self.machine.overlap * beside + (1 - self.machine.overlap) * after
            self._spend(rank, self._unpacking(transfer, rank, fetch, adjoint, apart), f"unpack {fetch}")
            if adjoint and transfer.sum_axes and transfer_value(self.program, fetch) not in self.graph.replicated:
                own = transfer.owns.region(rank).size * itemsize
                self._spend(rank, allreduce_s(self.machine, self.mesh, transfer.sum_axes, own), f"sum {fetch}")

    def _unpacking(self, transfer: Transfer, rank: int, fetch: str, adjoint: bool, apart: bool) -> float:
        own, need = transfer.owns.region(rank), transfer.needs[rank]
        _, recvs = self._route(fetch, rank, adjoint)
        each = self.local.overhead_s * len(recvs) + self.local.fetch_s * bool(recvs)
        each += 2 * self._bytes(fetch, recvs) * self.local.memory_seconds_per_byte
        whole = own if adjoint else need
        if own == need or (not adjoint and not recvs):
            return 0.0
        buffer = self.local.overhead_s + 2 * whole.size * self._itemsize(fetch) * self.local.memory_seconds_per_byte
        return each if apart else each + buffer

    def _message(self, source: int, target: int, sent: float, nbytes: int, name: str) -> tuple[float, float]:
        """When a message has arrived, and how long it takes by itself. Ports and shared links take one at a time."""
        number = self.machine.level_of(source, target)
        level = self.machine.levels[number]
        took = level.latency_s + nbytes * level.seconds_per_byte
        links = [(number, "in of rank", target)]
        if level.shared_by > 1:
            links += [(number, "out", source // level.shared_by), (number, "in", target // level.shared_by)]
        start = max([sent, *(self.ports.get(link, 0.0) for link in links)])
        self.ports[links[0]] = start + took
        for link in links[1:]:
            self.ports[link] = start + nbytes * level.seconds_per_byte
        self.events.append(Event(target, "messages", f"{name} from {source}", start, took))
        return start + took, took

    def _reduce(self, name: str, kind: str, axes: tuple[str, ...], forward: bool) -> None:
        if not axes:
            return
        node, placement = self.nodes[name], self.program.placement
        for group in self._groups(axes):
            writes = rule_for(node).writes(node, placement.at(node, group[0]))
            nbytes = partial_bytes(node, writes, forward)
            seconds = reduction_s(self.machine, self.mesh, kind, axes, nbytes)
            together = max(self.state[rank].clock for rank in group)
            for rank in group:
                self.state[rank].clock = together
                self._spend(rank, seconds, f"{kind} {node.origin.module}", "sums")

    def _groups(self, axes: tuple[str, ...]) -> list[list[int]]:
        """The followed ranks, those together that differ along `axes` only."""
        found: dict[int, list[int]] = {}
        for rank in self.ranks:
            found.setdefault(self.mesh.moved(rank, axes, 0), []).append(rank)
        return list(found.values())

    def _start_sum(self, number: int, axes: tuple[str, ...], leaves: Iterable[str]) -> None:
        nbytes = sum(self.graph.types[leaf].nbytes for leaf in leaves)
        full = allreduce_s(self.machine, self.mesh, axes, nbytes)
        for group in self._groups(axes):
            for rank in group:
                self._spend(rank, packing_s(self.machine, nbytes), f"pack sum {number}")
            start = max(max(self.state[rank].clock, self.state[rank].sums_free) for rank in group)
            hidden = self.machine.overlap * full
            for rank in group:
                state = self.state[rank]
                state.sums_free = state.sums[number] = start + hidden
                self.events.append(Event(rank, "sums", f"sum {number}", start, hidden))
                self._spend(rank, full - hidden, f"sum {number}")


def transfer_value(program: Program, fetch: str) -> str:
    """The value that a fetch brings."""
    return program.fetches[fetch].value


def followed(machine: Machine, plan: Plan) -> tuple[int, ...]:
    """The ranks to follow: all, or the nodes (the ranks that share a link) of the sample ranks."""
    size = plan.mesh.size
    if size <= FOLLOWED:
        return tuple(range(size))
    node = max(level.shared_by for level in machine.levels)
    found = {rank for sample in sample_ranks(plan.mesh) for rank in range(sample // node * node, size)
             if rank < sample // node * node + node}  # fmt: skip
    return tuple(sorted(found))
