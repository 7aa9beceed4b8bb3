"""What it costs a rank to bring a value from its layout to the region that is needed, and the gradient back."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..graph import Node
from ..layout import Layout
from ..lowering import least_apart_bytes
from ..mesh import Mesh
from ..ops import rule_for
from ..ops.rule import AdditiveRule
from ..region import Region
from .collective import allreduce_s
from .machine import Machine

CALLS_APART = 6  # torch calls that a halo box takes which is convolved apart: cut, pad, convolve, add; and backward


@dataclass(frozen=True)
class Moved:
    """One direction of a transfer at one rank: messages and bytes received, their time, and that of the copies around.

    `moving_s` can run beside computation where the reader adds its halo apart; then `buffer_s` is not spent. Messages
    are packed and put in place (`handling_s`) in any case.
    """

    messages: int
    nbytes: int
    moving_s: float
    handling_s: float
    buffer_s: float

    @property
    def seconds(self) -> float:
        """The time when nothing runs beside it."""
        return self.moving_s + self.handling_s + self.buffer_s


NOTHING = Moved(0, 0, 0.0, 0.0, 0.0)


def received(machine: Machine, owns: Layout, need: Region, rank: int, itemsize: int) -> Moved:
    """What `rank` receives to have `need`: the messages of `Transfer.route`, found for this rank alone.

    As many bytes leave a rank as come in on average, and a link carries both directions, so what comes in counts. A
    need that is not what the rank owns is put together in a buffer of its own, which reads and writes memory once.
    """
    own = owns.region(rank)
    if own == need or need.empty:
        return NOTHING
    pieces = [(peer, box.size * itemsize) for peer, box in owns.owners(need, near=rank) if peer != rank]
    return _moved(machine, rank, pieces, need.size * itemsize if pieces else 0)


def returned(
    machine: Machine, owns: Layout, need: Region, rank: int, itemsize: int, over: frozenset[str]
) -> tuple[Moved, float]:
    """What the adjoint of `received` costs `rank`, and the time of the sum over replicas that fed different work."""
    mesh, own = owns.mesh, owns.region(rank)
    sums = allreduce_s(machine, mesh, mesh.ordered(over - owns.axes), own.size * itemsize)
    if own == need or need.empty:
        return NOTHING, sums
    repeated = mesh.ordered(owns.axes - over)
    mine = mesh.part(rank, repeated)
    pieces = [
        (peer, box.size * itemsize)
        for peer, box in owns.owners(need, near=rank)
        if peer != rank and mesh.part(peer, repeated) == mine
    ]
    return _moved(machine, rank, pieces, own.size * itemsize), sums


def _moved(machine: Machine, rank: int, pieces: Sequence[tuple[int, int]], buffer_bytes: int) -> Moved:
    local, moving = machine.local, 0.0
    handling = local.fetch_s if pieces else 0.0
    for peer, size in pieces:
        level = machine.levels[machine.level_of(rank, peer)]
        moving += level.latency_s + size * level.seconds_per_byte
        handling += 2 * local.overhead_s + 4 * size * local.memory_seconds_per_byte  # packed there, put in place here
    buffer = local.overhead_s + 2 * buffer_bytes * local.memory_seconds_per_byte if buffer_bytes else 0.0
    return Moved(len(pieces), sum(size for _, size in pieces), moving, handling, buffer)


def beside_s(machine: Machine, moved: Moved, computing_s: float) -> float:
    """What a transfer adds to a computation of `computing_s` that goes on meanwhile and adds the halo boxes apart."""
    hidden = min(machine.overlap * moved.moving_s, computing_s)
    boxes = CALLS_APART * moved.messages * machine.local.overhead_s / 2
    return moved.moving_s - hidden + moved.handling_s + boxes


def may_stay_apart(mesh: Mesh, node: Node, position: int, owns: Layout, need: Region, own: Region) -> bool:
    """Whether a node's halo boxes stay apart from its own block: as `program` decides, seen from one rank."""
    rule = rule_for(node)
    if position or not isinstance(rule, AdditiveRule):
        return False
    block_bytes = node.input_types[0].nbytes // mesh.parts(mesh.ordered(owns.axes))
    cut = set(rule.additive_dims(node))
    others = (dim for dim in range(len(owns.dims)) if dim not in cut)
    return block_bytes >= least_apart_bytes(node) and all(own.intervals[dim] == need.intervals[dim] for dim in others)


def gradient_share(
    machine: Machine, mesh: Mesh, axes: tuple[str, ...], nbytes: float, bucket_bytes: float
) -> tuple[float, float]:
    """What `nbytes` of gradients add to the sums of buckets of `bucket_bytes`: allreduce, and packing before it."""
    if not nbytes or not axes:
        return 0.0, 0.0
    full = max(nbytes, bucket_bytes)
    summing = allreduce_s(machine, mesh, axes, full) * (nbytes / full)
    return summing, packing_s(machine, full) * (nbytes / full)


def packing_s(machine: Machine, nbytes: float) -> float:
    """The time to copy a bucket's gradients together and apart again."""
    return machine.local.overhead_s + 4 * nbytes * machine.local.memory_seconds_per_byte
