"""What every transport asks of a message before it passes it."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from halocline.comm.comm import Message
from halocline.errors import CommError


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


def describe(tensor: Tensor) -> str:
    """`float32[2, 3]`: a tensor's type, as error texts give it."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def foreign_device(place: Place, tensor: Tensor) -> str:
    """The error text for a `tensor` on a device that the transport does not reach."""
    return (
        f"rank {place.rank} of {place.size} ({place.name}): {describe(tensor)} lies on {tensor.device}, which this "
        f"transport does not reach. For CUDA set HALOCLINE_TRANSPORT=nccl, or move the model to the CPU."
    )


def _refusal(place: Place, what: str, peer: int, tensor: Tensor) -> str:
    where = f"rank {place.rank} of {place.size} ({place.name}): {what} rank {peer}, {describe(tensor)}"
    if peer == place.rank:
        return f"{where}: a rank passes nothing to itself. Copy the tensor instead."
    if not 0 <= peer < place.size:
        return f"{where}: there is no such rank. The plan was made for another number of ranks."
    if not tensor.numel():
        return f"{where}: the tensor is empty. Leave such a message out on both ranks."
    return f"{where}: the tensor has strides {tensor.stride()} and is not contiguous. Pack it first."
