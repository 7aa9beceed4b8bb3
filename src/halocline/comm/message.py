"""What every transport asks of a message and of a reduction before it starts one."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from halocline.comm.comm import Message, ReduceOp
from halocline.errors import CommError

REDUCE: dict[ReduceOp, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}

# What two ranks add in half precision would depend on their number and order far more than one process does.
ACCUMULATE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class Place(Protocol):
    """Where a call comes from: the part of a `Comm` that error texts quote."""

    rank: int
    size: int
    name: str


def check_messages(place: Place, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
    """Raise `CommError` for a peer that does not exist or a tensor that cannot be passed as one run of bytes."""
    for peer, tensor in sends:
        if peer == place.rank or not 0 <= peer < place.size or not tensor.is_contiguous() or not tensor.numel():
            raise CommError(_refusal(place, "send to", peer, tensor))
    for peer, tensor in recvs:
        if peer == place.rank or not 0 <= peer < place.size or not tensor.is_contiguous() or not tensor.numel():
            raise CommError(_refusal(place, "receive from", peer, tensor))


def check_reduction(place: Place, tensor: Tensor, group: tuple[int, ...], op: ReduceOp) -> None:
    """Raise `CommError` for a group without this rank, an unknown `op`, or a tensor that has no such reduction."""
    where = f"rank {place.rank} of {place.size} ({place.name}): all_reduce {op} over ranks {group}"
    if place.rank not in group or list(group) != sorted(set(group)) or group[0] < 0 or group[-1] >= place.size:
        raise CommError(f"{where}: a group is a sorted tuple of existing ranks, this rank among them.")
    if op not in REDUCE:
        raise CommError(f"{where}: there is no such reduction. Use sum, max or min.")
    if not tensor.is_contiguous() or not tensor.numel():
        raise CommError(f"{where}: the tensor {describe(tensor)} is empty or not contiguous. Pass a contiguous one.")
    if tensor.dtype == torch.bool and op == "sum":
        raise CommError(f"{where}: booleans have no sum. Use max for 'any', min for 'all', or count in int64.")


def describe(tensor: Tensor) -> str:
    """`float32[2, 3]`: a tensor's type, as error texts give it."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _refusal(place: Place, what: str, peer: int, tensor: Tensor) -> str:
    where = f"rank {place.rank} of {place.size} ({place.name}): {what} rank {peer}, {describe(tensor)}"
    if peer == place.rank:
        return f"{where}: a rank passes nothing to itself. Copy the tensor instead."
    if not 0 <= peer < place.size:
        return f"{where}: there is no such rank. The plan was made for another number of ranks."
    if not tensor.numel():
        return f"{where}: the tensor is empty. Leave such a message out on both ranks."
    return f"{where}: the tensor has strides {tensor.stride()} and is not contiguous. Pack it first."
