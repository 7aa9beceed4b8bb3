"""What it costs a rank to bring a value from its layout to the region that is needed, and the gradient back."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..layout import Layout
from ..mesh import Mesh
from ..region import Region
from .collective import allreduce_s
from .machine import Machine


@dataclass(frozen=True)
class Moved:
    """One direction of a transfer at one rank: messages and bytes received on each level, and the time."""

    messages: int
    nbytes: int
    seconds: float


NOTHING = Moved(0, 0, 0.0)


def received(machine: Machine, owns: Layout, need: Region, rank: int, itemsize: int) -> Moved:
    """What `rank` receives to have `need`: the messages of `Transfer.route`, found for this rank alone.

    As many bytes leave a rank as come in on average, and a link carries both directions, so what comes in counts. A
    need that is not what the rank owns is put together in a buffer of its own, which reads and writes memory once.
    """
    own = owns.region(rank)
    if own == need or need.empty:
        return NOTHING
    pieces = [(peer, box.size * itemsize) for peer, box in owns.owners(need, near=rank) if peer != rank]
    if not pieces:
        return Moved(0, 0, 0.0)  # a view of what the rank owns
    return Moved(len(pieces), sum(size for _, size in pieces), _seconds(machine, rank, pieces, need.size * itemsize))


def returned(
    machine: Machine, owns: Layout, need: Region, rank: int, itemsize: int, over: frozenset[str]
) -> tuple[Moved, float]:
    """What the adjoint of `received` costs `rank`, and the time of the sum over replicas that fed different work."""
    mesh, own = owns.mesh, owns.region(rank)
    sums = allreduce_s(machine, mesh, mesh.ordered(over - owns.axes), own.size * itemsize)
    if own == need:
        return NOTHING, sums
    if need.empty:
        return NOTHING, sums
    repeated = mesh.ordered(owns.axes - over)
    mine = mesh.part(rank, repeated)
    pieces = [
        (peer, box.size * itemsize)
        for peer, box in owns.owners(need, near=rank)
        if peer != rank and mesh.part(peer, repeated) == mine
    ]
    buffer = own.size * itemsize
    return Moved(len(pieces), sum(size for _, size in pieces), _seconds(machine, rank, pieces, buffer)), sums


def _seconds(machine: Machine, rank: int, pieces: Iterable[tuple[int, int]], buffer_bytes: int) -> float:
    local = machine.local
    total = local.overhead_s + 2 * buffer_bytes * local.memory_seconds_per_byte
    for peer, size in pieces:
        level = machine.levels[machine.level_of(rank, peer)]
        total += level.latency_s + size * level.seconds_per_byte
        total += 2 * local.overhead_s + 4 * size * local.memory_seconds_per_byte  # packed there, put in place here
    return total


def gradient_share(
    machine: Machine, mesh: Mesh, axes: tuple[str, ...], nbytes: float, bucket_bytes: float
) -> tuple[float, float]:
    """What `nbytes` of gradients add to the sums of buckets of `bucket_bytes`: the allreduce, and the packing before."""
    if not nbytes or not axes:
        return 0.0, 0.0
    full = max(nbytes, bucket_bytes)
    summing = allreduce_s(machine, mesh, axes, full) * (nbytes / full)
    return summing, packing_s(machine, full) * (nbytes / full)


def packing_s(machine: Machine, nbytes: float) -> float:
    """The time to copy a bucket's gradients together and apart again."""
    return machine.local.overhead_s + 4 * nbytes * machine.local.memory_seconds_per_byte
