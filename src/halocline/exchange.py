"""Moves local tensors along a `Transfer`: packs, exchanges, and puts or adds what comes in."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .comm.comm import DONE, Comm, Handle
from .region import Region
from .transfer import Messages, Transfer


@dataclass
class Moving:
    """An exchange under way: the handle, and the buffer that comes from each peer."""

    handle: Handle
    sent: list[tuple[int, Tensor]]
    received: list[tuple[int, Tensor]]
    source: Tensor


class Mover:
    """One rank's part of a `Transfer`, with all slices worked out beforehand."""

    def __init__(self, transfer: Transfer, rank: int) -> None:
        self.own, self.need = transfer.owns.region(rank), transfer.needs[rank]
        self.local, self.in_place = transfer.local, transfer.in_place
        forward, adjoint = transfer.route(rank), transfer.adjoint(rank)
        self.keeps = forward.keeps
        self.kept_own, self.kept_need = self.keeps.within(self.own), self.keeps.within(self.need)
        self.out, self.into = _slices(forward.sends, self.own), _slices(forward.recvs, self.need)
        self.back_out, self.back_into = _slices(adjoint.sends, self.need), _slices(adjoint.recvs, self.own)

    def start(self, own: Tensor, comm: Comm) -> Moving:
        """Sends what others need of `own`, the tensor of the region this rank owns."""
        return _post(own, comm, self.out, self.into)

    def finish(self, moving: Moving) -> Tensor:
        """The tensor of the region this rank needs; a view of what it owns where nothing else is needed."""
        moving.handle.wait()
        own = moving.source
        if self.in_place:
            return own
        if self.local:
            return own[self.need.within(self.own)] if not self.need.empty else own.new_empty(self.need.shape)
        need = empty_like(own, self.need)
        if not self.keeps.empty:
            need[self.kept_need] = own[self.kept_own]
        for slices, piece in _pieces(moving, self.into):
            need[slices] = piece
        return need

    def start_adjoint(self, grad: Tensor, comm: Comm) -> Moving:
        """Sends the gradient of the needed region back to the owners."""
        return _post(grad, comm, self.back_out, self.back_into)

    def finish_adjoint(self, moving: Moving) -> Tensor:
        """The gradient of the region this rank owns: its own share and what came in, added in the order of ranks."""
        moving.handle.wait()
        if self.in_place:
            return moving.source
        if self.keeps == self.own:
            total = moving.source[self.kept_need]
            if self.back_into:
                total = total.clone(memory_format=torch.preserve_format)
        else:
            total = empty_like(moving.source, self.own).zero_()
            if not self.keeps.empty:
                total[self.kept_own] += moving.source[self.kept_need]
        for slices, piece in _pieces(moving, self.back_into):
            total[slices] += piece
        return total


Slices = list[tuple[int, list[tuple[tuple[slice, ...], tuple[int, ...]]]]]


def _slices(messages: Messages, outer: Region) -> Slices:
    return [(peer, [(box.within(outer), box.shape) for box in boxes]) for peer, boxes in messages]


def _post(source: Tensor, comm: Comm, out: Slices, into: Slices) -> Moving:
    if not out and not into:
        return Moving(DONE, [], [], source)
    sends = [(peer, _packed(source, boxes)) for peer, boxes in out]
    recvs = [(peer, source.new_empty(sum(_count(shape) for _, shape in boxes))) for peer, boxes in into]
    return Moving(comm.exchange(sends, recvs), sends, recvs, source)


def _packed(source: Tensor, boxes: list[tuple[tuple[slice, ...], tuple[int, ...]]]) -> Tensor:
    if len(boxes) == 1:
        return source[boxes[0][0]].contiguous().view(-1)
    return torch.cat([source[slices].reshape(-1) for slices, _ in boxes])


def _pieces(moving: Moving, into: Slices) -> list[tuple[tuple[slice, ...], Tensor]]:
    pieces = []
    for (_, buffer), (_, boxes) in zip(moving.received, into, strict=True):
        start = 0
        for slices, shape in boxes:
            count = _count(shape)
            pieces.append((slices, buffer[start : start + count].view(shape)))
            start += count
    return pieces


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def empty_like(tensor: Tensor, region: Region) -> Tensor:
    """An uninitialised tensor for `region` with `tensor`'s dtype, device and memory format."""
    format = torch.contiguous_format
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous():
        format = torch.channels_last
    if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d) and not tensor.is_contiguous():
        format = torch.channels_last_3d
    return torch.empty(region.shape, dtype=tensor.dtype, device=tensor.device, memory_format=format)
