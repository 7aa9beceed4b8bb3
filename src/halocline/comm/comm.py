"""`Comm`: the only thing that talks to other processes."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

ReduceOp = Literal["sum", "max", "min"]
Message = tuple[int, Tensor]


class Handle(Protocol):
    """A communication under way. `wait` returns when its tensors may be used again."""

    def wait(self) -> None: ...


class Done:
    """The handle of a communication that has already ended."""

    def wait(self) -> None:
        return None


DONE = Done()


class Comm(Protocol):
    """Point-to-point messages and allreduce between `size` ranks.

    Every rank makes the same calls in the same order, with the messages that concern it. Two messages between the
    same pair of ranks arrive in the order in which they were sent. Tensors are contiguous and not empty; they
    belong to the communication until its handle's `wait` has returned. A tensor whose bytes a peer never sends
    does not wait for ever: `wait` raises `CommError` when a peer has failed or `timeout_s` has passed.
    """

    rank: int
    size: int
    name: str

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        """Send each `(peer, tensor)` of `sends`, and fill each `(peer, tensor)` of `recvs`."""

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...], op: ReduceOp = "sum") -> Handle:
        """Reduce `tensor` in place over the ranks of `group` (sorted, holding this rank). Equal bits on all of them."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order. For agreement and planning, not for data."""

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this one cannot go on, so that none of them waits. Returns at once."""

    def close(self) -> None:
        """End the communication; nothing may be called afterwards."""
