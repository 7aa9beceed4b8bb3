"""`SingleComm`: one process alone."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from halocline.comm.comm import DONE, Handle, Message, ReduceOp
from halocline.comm.message import check_messages
from halocline.comm.reduction import check_reduction


class SingleComm:
    """The `Comm` of one rank: nothing moves, and a message to itself is refused with `CommError`."""

    rank = 0
    size = 1
    name = "single"

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        check_messages(self, sends, recvs)
        return DONE

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...], op: ReduceOp = "sum") -> Handle:
        check_reduction(self, tensor, group, op)
        return DONE

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def fail(self, reason: str) -> None:
        return None

    def close(self) -> None:
        return None
