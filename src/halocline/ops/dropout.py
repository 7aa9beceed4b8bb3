"""Dropout whose mask depends on where an element lies in the whole tensor, not on who holds it.

Every split over any number of ranks drops the same elements, replicas agree, and parts differ. To match one process,
give a plain module the mask `keep_mask(Region.whole(shape), shape, p, mask_key(noise, name))`.
"""

import random
from collections.abc import Sequence
from hashlib import blake2b
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..graph import Node
from ..region import Region
from .blocks import blocks
from .rule import Call, Example, Grads, Noise, Rule, Signature, index_names, register, torch_op

# Multipliers of two well-known integer hashes: odd, and chosen so that each input bit changes half of the output bits.
MURMUR = (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64))
LOWBIAS = (0x7FEB352D, 0x846CA68B - (1 << 32))
ALPHA = 1.7580993408473766  # minus the limit of SELU towards minus infinity, to which alpha dropout sets elements


def mask_key(noise: Noise, name: str) -> tuple[int, int]:
    """Two 64-bit numbers for the mask of the node `name` in one step of one run."""
    digest = blake2b(f"{noise.seed}/{noise.step}/{name}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)


def keep_mask(
    region: Region, shape: Sequence[int], p: float, key: tuple[int, int], like: Tensor | None = None
) -> Tensor:
    """Which elements of `region` of a tensor of `shape` are kept, each with probability `1 - p`.

    A pure function of the arguments and of each element's place in the whole: a hash of the place along the leading
    dims and one of that along the trailing dims are added, and the sum is hashed again. The mask is as `like` in
    device and memory order.
    """
    mask = torch.empty(region.shape, dtype=torch.bool) if like is None else torch.empty_like(like, dtype=torch.bool)
    if not mask.numel():
        return mask
    cut = _cut_in_two(shape)
    rows = _hashed(_places(region, shape, range(cut), mask.device), key[0])
    columns = _hashed(_places(region, shape, range(cut, len(shape)), mask.device), key[1])
    least = min(round(p * 2**32), 2**32 - 1) - 2**31
    for block in blocks(mask):
        here = mask[block]
        mixed = torch.empty_like(here, dtype=torch.int32)
        torch.add(_cut(rows, block), _cut(columns, block), out=mixed)
        torch.ge(_mixed(mixed), least, out=here)
    return mask


def place_hash(region: Region, shape: Sequence[int], key: tuple[int, int], device: torch.device) -> Tensor:
    """32 random-looking bits for every element of `region` of a tensor of `shape`, as `keep_mask` uses them."""
    cut = _cut_in_two(shape)
    rows = _hashed(_places(region, shape, range(cut), device), key[0])
    columns = _hashed(_places(region, shape, range(cut, len(shape)), device), key[1])
    return _mixed((rows + columns).expand(region.shape).contiguous())


def _cut_in_two(shape: Sequence[int]) -> int:
    """The dim at which the leading dims end and the trailing ones, of about as many places, begin."""
    return next(dim for dim in range(len(shape), -1, -1) if prod(shape[dim:]) ** 2 >= prod(shape))


def _mixed(mixed: Tensor) -> Tensor:
    """In place: every bit depends on all bits."""
    shifted = torch.empty_like(mixed)
    for multiplier in LOWBIAS:  # the shift is arithmetic, which loses one bit of 32
        mixed.bitwise_xor_(torch.bitwise_right_shift(mixed, 15, out=shifted)).mul_(multiplier)
    return mixed


def _places(region: Region, shape: Sequence[int], dims: range, device: torch.device) -> Tensor:
    """The linear place of each element along `dims`, in the whole tensor; the other dims have size 1."""
    place = torch.zeros((1,) * len(shape), dtype=torch.int64, device=device)
    for dim in dims:
        along = torch.arange(*region.intervals[dim], device=device)
        place = place * shape[dim] + along.view([-1 if other == dim else 1 for other in range(len(shape))])
    return place


def _hashed(place: Tensor, key: int) -> Tensor:
    """The 32-bit hash of a 64-bit number and a key."""
    mixed = place + key
    for multiplier in MURMUR:
        mixed = (mixed ^ (mixed >> 33 & 0x7FFFFFFF)) * multiplier
    return (mixed >> 32).to(torch.int32)


def _cut(x: Tensor, block: tuple[slice, ...]) -> Tensor:
    return x[tuple(slice(None) if size == 1 else part for size, part in zip(x.shape, block))]


class Dropout(Rule):
    """Dropout of elements or of whole channels (`feature_`), plain or keeping the moments of SELU nets (`alpha_`)."""

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        return Signature(dict(zip(names, node.type.shape)), (names,), names)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        """What `forward` gives, differentiable: for one process to be compared with."""
        (x,) = inputs
        if not call["train"] or call["p"] == 0:
            return x
        if call["p"] == 1:
            return x * 0
        mask = self._mask(call, x.detach())
        scale, shift = _scale_and_shift(call)
        output = x * mask * scale
        return output if shift is None else output + ~mask * shift[0] + shift[1]

    def forward(self, call: Call, inputs: Sequence[Tensor]) -> tuple[Tensor, Any]:
        (x,) = inputs
        if not call["train"] or call["p"] == 0:
            return x, ()
        if call["p"] == 1:
            return torch.zeros_like(x), (None, 0.0)
        mask = self._mask(call, x)
        scale, shift = _scale_and_shift(call)
        output = (x * mask).mul_(scale)
        if shift is not None:
            output.add_((~mask).to(x.dtype), alpha=shift[0]).add_(shift[1])
        return output, (mask, scale)

    def _mask(self, call: Call, x: Tensor) -> Tensor:
        region, shape, like = call.writes, call.node.type.shape, x
        if call.node.op.startswith("feature"):
            region = Region((*region.intervals[:2], *((0, 1) for _ in shape[2:])))
            shape = (*shape[:2], *(1 for _ in shape[2:]))
            like = x.new_empty(region.shape)
        return keep_mask(region, shape, call["p"], mask_key(call.noise, call.node.name), like)

    def backward(self, call: Call, saved: Any, grad: Tensor) -> Grads:
        if not saved:
            return (grad,)
        mask, scale = saved
        return (torch.zeros_like(grad) if mask is None else (grad * mask).mul_(scale),)

    def example(self, rng: random.Random) -> Example:
        """Only what draws nothing: torch's own masks are of another kind."""
        x = torch.randn([rng.randint(1, 6) for _ in range(rng.randint(2, 5))], dtype=torch.float64)
        op = rng.choice(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"))
        p, train = rng.choice(((0.5, False), (0.0, True), (1.0, True), (1.0, False)))
        return Example(torch_op(op).default, (x, p, train))


def _scale_and_shift(call: Call) -> tuple[float, tuple[float, float] | None]:
    """What kept elements are multiplied by; for alpha dropout what is added to dropped ones, and then to all."""
    p = call["p"]
    if "alpha" not in call.node.op:
        return 1 / (1 - p), None
    scale = ((ALPHA**2 * p + 1) * (1 - p)) ** -0.5
    return scale, (-ALPHA * scale, ALPHA * scale * p)


register(Dropout(), "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
