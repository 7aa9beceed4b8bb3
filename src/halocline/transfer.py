"""`Transfer`: from what every rank owns and what every rank needs, the messages.

Halo exchange, gather, scatter and reshuffle are all this one thing; its adjoint is the backward pass.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from .layout import Layout
from .region import Region

Messages = tuple[tuple[int, tuple[Region, ...]], ...]


@dataclass(frozen=True)
class Route:
    """One rank's part of a transfer: the box it has already, and the boxes it sends to and receives from each peer.

    One message goes to a peer, holding that peer's boxes in order. Peers are sorted.
    """

    keeps: Region
    sends: Messages
    recvs: Messages

    @cached_property
    def reversed(self) -> "Route":
        return Route(self.keeps, self.recvs, self.sends)


@dataclass(frozen=True)
class Transfer:
    """Brings to every rank the region `needs[rank]` of a value laid out as `owns`.

    `over` are the mesh axes along which the needing ranks do *different* work. They decide what the adjoint counts:
    along an axis in `over` every rank's gradient is a contribution of its own; along the others all ranks computed
    the same, so it is counted once.
    """

    owns: Layout
    needs: tuple[Region, ...]
    over: frozenset[str]

    @cached_property
    def local(self) -> bool:
        """Whether every rank already owns all it needs, so that no message is sent."""
        return all(self.owns.region(rank).holds(want) for rank, want in enumerate(self.needs))

    @cached_property
    def in_place(self) -> bool:
        """Whether every rank needs exactly what it owns."""
        return all(self.owns.region(rank) == want for rank, want in enumerate(self.needs))

    @cached_property
    def sum_axes(self) -> tuple[str, ...]:
        """The axes over which the adjoint's result must still be summed: replicas that fed different work."""
        return self.owns.mesh.ordered(self.over - self.owns.axes)

    def route(self, rank: int) -> Route:
        """The forward messages of `rank`: owners send, those who need receive."""
        sends: dict[int, list[Region]] = defaultdict(list)
        recvs: dict[int, list[Region]] = defaultdict(list)
        own = self.owns.region(rank)
        if not self.local:
            for peer, box in self.owns.owners(self.needs[rank], near=rank):
                if peer != rank:
                    recvs[peer].append(box)
            for peer in self._replica_plane(rank):
                box = own.meet(self.needs[peer])
                if peer != rank and not box.empty:
                    sends[peer].append(box)
        return Route(self.needs[rank].meet(own), _frozen(sends), _frozen(recvs))

    def adjoint(self, rank: int) -> Route:
        """The backward messages of `rank`: those who needed send their gradient back, owners add up what comes.

        Where the needing ranks along an axis that splits the value all did the same work, an owner takes the
        gradient of the one at its own coordinate: each distinct part of the computation contributes once.
        """
        repeated = self.owns.mesh.ordered(self.owns.axes - self.over)
        part = self.owns.mesh.part
        forward = self.route(rank)

        def counted(messages: Messages) -> Messages:
            return tuple((peer, boxes) for peer, boxes in messages if part(peer, repeated) == part(rank, repeated))

        return Route(forward.keeps, counted(forward.recvs), counted(forward.sends))

    def received_bytes(self, rank: int, itemsize: int) -> int:
        """How many bytes `rank` receives in the forward pass."""
        return itemsize * sum(box.size for _, boxes in self.route(rank).recvs for box in boxes)

    def _replica_plane(self, rank: int) -> tuple[int, ...]:
        """The ranks that would be served by `rank`'s replica: those that differ in the splitting axes only."""
        mesh = self.owns.mesh
        return mesh.group(rank, mesh.ordered(self.owns.axes))


def _frozen(messages: dict[int, list[Region]]) -> Messages:
    return tuple((peer, tuple(messages[peer])) for peer in sorted(messages))
