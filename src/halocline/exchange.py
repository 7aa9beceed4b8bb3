"""Moves local tensors along a `Transfer`: packs, exchanges, and puts or adds what comes in."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .comm.comm import DONE, Comm, Handle, Message
from .region import Region
from .transfer import Messages, Transfer


@dataclass
class Moving:
    """An exchange under way: its handle, the tensor it started from, and the buffer that comes from each peer."""

    handle: Handle
    source: Tensor
    received: list[Tensor]


@dataclass(frozen=True)
class Boxes:
    """The boxes in the message to or from one peer, cut out of a tensor that holds some outer region."""

    peer: int
    regions: tuple[Region, ...]
    slices: tuple[tuple[slice, ...], ...]
    size: int


class Mover:
    """One rank's part of a `Transfer`, with all slices worked out beforehand.

    On the wire the values of a box lie in the order of its dims, channels last where `channels_last` says that the
    tensors lie so in memory: a halo of rows is then one block, sent and received without a copy.
    """

    def __init__(self, transfer: Transfer, rank: int, channels_last: bool = False) -> None:
        self.own, self.need = transfer.owns.region(rank), transfer.needs[rank]
        self.local, self.in_place = transfer.local, transfer.in_place
        forward, adjoint = transfer.route(rank), transfer.adjoint(rank)
        self.keeps = forward.keeps
        self.kept_own, self.kept_need = self.keeps.within(self.own), self.keeps.within(self.need)
        self.out, self.into = _boxes(forward.sends, self.own), _boxes(forward.recvs, self.need)
        self.back_out, self.back_into = _boxes(adjoint.sends, self.need), _boxes(adjoint.recvs, self.own)
        self.channels_last = channels_last

    def start(self, own: Tensor, comm: Comm) -> Moving:
        """Sends what others need of `own`, the tensor of the region this rank owns."""
        return self._post(own, [(boxes.peer, self._packed(own, boxes)) for boxes in self.out], self.into, comm)

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
        for slices, _, piece in self._pieces(moving, self.into):
            need[slices] = piece
        return need

    def kept(self, own: Tensor) -> Tensor:
        """What this rank needs of what it owns, without a copy."""
        return own if self.keeps == self.own else own[self.kept_own] if not self.keeps.empty else own[:0]

    def finish_apart(self, moving: Moving) -> list[tuple[Region, Tensor]]:
        """The boxes that this rank needs of others, each apart, instead of one tensor with what it owns."""
        moving.handle.wait()
        return [(region, piece) for _, region, piece in self._pieces(moving, self.into)]

    def start_adjoint(self, grad: Tensor, comm: Comm) -> Moving:
        """Sends the gradient of the needed region back to the owners."""
        sends = [(boxes.peer, self._packed(grad, boxes)) for boxes in self.back_out]
        return self._post(grad, sends, self.back_into, comm)

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
        for slices, _, piece in self._pieces(moving, self.back_into):
            total[slices] += piece
        return total

    def start_adjoint_apart(self, grads: Sequence[Tensor], like: Tensor, comm: Comm) -> Moving:
        """Sends back the gradients of the boxes that `finish_apart` gave, in their order; `like` gives the dtype."""
        counted = {boxes.peer for boxes in self.back_out}
        sends, rest = [], list(grads)
        for boxes in self.into:
            mine, rest = rest[: len(boxes.regions)], rest[len(boxes.regions) :]
            if boxes.peer in counted:
                flat = [on_wire(grad, self.channels_last) for grad in mine]
                sends.append((boxes.peer, _dense(flat[0] if len(flat) == 1 else torch.cat(flat))))
        return self._post(like, sends, self.back_into, comm)

    def finish_adjoint_apart(self, moving: Moving, kept: Tensor) -> Tensor:
        """The gradient of the region this rank owns, from that of what it kept (which is changed) and what came in."""
        moving.handle.wait()
        if self.keeps == self.own:
            total = kept
        else:
            total = empty_like(kept, self.own).zero_()
            if not self.keeps.empty:
                total[self.kept_own] = kept
        for slices, _, piece in self._pieces(moving, self.back_into):
            total[slices] += piece
        return total

    def _post(self, source: Tensor, sends: list[Message], into: Sequence[Boxes], comm: Comm) -> Moving:
        if not sends and not into:
            return Moving(DONE, source, [])
        received = [source.new_empty(boxes.size) for boxes in into]
        handle = comm.exchange(sends, [(boxes.peer, buffer) for boxes, buffer in zip(into, received)])
        return Moving(handle, source, received)

    def _packed(self, source: Tensor, boxes: Boxes) -> Tensor:
        flat = [on_wire(source[slices], self.channels_last) for slices in boxes.slices]
        return _dense(flat[0] if len(flat) == 1 else torch.cat(flat))

    def _pieces(self, moving: Moving, into: Sequence[Boxes]) -> list[tuple[tuple[slice, ...], Region, Tensor]]:
        pieces = []
        for buffer, boxes in zip(moving.received, into, strict=True):
            start = 0
            for slices, region in zip(boxes.slices, boxes.regions):
                piece = off_wire(buffer[start : start + region.size], region.shape, self.channels_last)
                pieces.append((slices, region, piece))
                start += region.size
        return pieces


def on_wire(tensor: Tensor, channels_last: bool) -> Tensor:
    """The values of `tensor` one after the other, channels last where tensors with space lie so in memory."""
    return (tensor.movedim(1, -1) if channels_last and tensor.dim() >= 4 else tensor).reshape(-1)


def off_wire(flat: Tensor, shape: tuple[int, ...], channels_last: bool) -> Tensor:
    """The tensor of `shape` whose values `flat` holds in the order of `on_wire`, as a view."""
    if channels_last and len(shape) >= 4:
        return flat.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    return flat.view(shape)


def _boxes(messages: Messages, outer: Region) -> tuple[Boxes, ...]:
    return tuple(
        Boxes(peer, regions, tuple(r.within(outer) for r in regions), sum(prod(r.shape) for r in regions))
        for peer, regions in messages
    )


def _dense(flat: Tensor) -> Tensor:
    """`flat` with stride 1: a tensor of one element may have any, which not every transport takes."""
    return flat if flat.stride(0) == 1 else torch.empty_like(flat, memory_format=torch.contiguous_format).copy_(flat)


FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(tensor: Tensor) -> Tensor:
    """A floating-point tensor with channels and space in channels-last memory format, any other as it is."""
    if tensor.dim() in FORMATS and tensor.is_floating_point():
        return tensor.contiguous(memory_format=FORMATS[tensor.dim()])
    return tensor


def empty_like(tensor: Tensor, region: Region) -> Tensor:
    """An uninitialised tensor for `region` with `tensor`'s dtype, device and memory format."""
    format = FORMATS.get(tensor.dim(), torch.contiguous_format)
    if tensor.is_contiguous() or not tensor.is_contiguous(memory_format=format):
        format = torch.contiguous_format
    return torch.empty(region.shape, dtype=tensor.dtype, device=tensor.device, memory_format=format)
