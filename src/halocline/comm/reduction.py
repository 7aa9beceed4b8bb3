"""What a reduction means, whatever carries it: accumulation types, and not-a-number in a maximum."""

import torch
from torch import Tensor

from halocline.comm.comm import ReduceOp
from halocline.comm.message import Place, describe
from halocline.errors import CommError

# Summed on the wire in a wider type: in half precision a sum over ranks would be rounded at every one of them.
_ACCUMULATE = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.int16: torch.int32,
    torch.bool: torch.uint8,
}
_WIRE = {torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
_ORDERED = {torch.float32: torch.int32, torch.float64: torch.int64}


def check_reduction(place: Place, tensor: Tensor, group: tuple[int, ...], op: ReduceOp) -> None:
    """Raise `CommError` for a group without this rank, an unknown `op`, or a tensor that has no such reduction."""
    where = f"rank {place.rank} of {place.size} ({place.name}): all_reduce {op} of {describe(tensor)} over {group}"
    if place.rank not in group or list(group) != sorted(set(group)) or group[0] < 0 or group[-1] >= place.size:
        raise CommError(f"{where}: a group is a sorted tuple of existing ranks, this rank among them.")
    if op not in ("sum", "max", "min"):
        raise CommError(f"{where}: there is no such reduction. Use sum, max or min.")
    if not tensor.is_contiguous() or not tensor.numel():
        raise CommError(f"{where}: the tensor is empty or not contiguous. Pass a contiguous one.")
    if _ACCUMULATE.get(tensor.dtype, tensor.dtype) not in _WIRE:
        raise CommError(f"{where}: no transport reduces this dtype. Convert it to one of {sorted(map(str, _WIRE))}.")
    if tensor.dtype == torch.bool and op == "sum":
        raise CommError(f"{where}: booleans have no sum. Use max for 'any', min for 'all', or count in int64.")


def to_wire(tensor: Tensor, op: ReduceOp) -> Tensor:
    """What to reduce in place of `tensor`, with the same `op`: itself where the transports do the right thing.

    Sums of bfloat16 and float16 are taken in float32. Maxima and minima of floating numbers are taken of integers in
    the same order, in which not-a-number is the largest (smallest): the transports' own comparison drops it, or not,
    depending on which rank held it.
    """
    wire = tensor.detach()
    if wire.dtype in _ACCUMULATE:
        wire = wire.to(_ACCUMULATE[wire.dtype])
    if op != "sum" and wire.dtype in _ORDERED:
        nan = torch.full((), float("nan") if op == "max" else -float("nan"), dtype=wire.dtype, device=wire.device)
        wire = _ordered(torch.where(wire.isnan(), nan, wire).view(_ORDERED[wire.dtype]))
    return wire


def from_wire(wire: Tensor, tensor: Tensor, op: ReduceOp) -> None:
    """Put the reduced `wire` back into `tensor`."""
    if wire.data_ptr() == tensor.data_ptr():
        return
    if op != "sum" and tensor.is_floating_point():
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        wire = _ordered(wire).view(dtype)
    tensor.detach().copy_(wire)


def _ordered(bits: Tensor) -> Tensor:
    """The bits of floating numbers as integers in the same order; its own inverse."""
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)
