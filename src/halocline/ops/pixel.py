"""Channels become space and back: index space n, c and the rows and columns of the coarse image."""

import random

import torch
from torch import Tensor

from ..graph import Node
from ..region import Region
from .call_op import call_op
from .intervals import scaled
from .rule import At, Call, Dims, Example, Rule, Signature, index_names, register, torch_op


class PixelShuffle(Rule):
    """A coarse [.. C r^2, H, W] becomes a fine [.. C, H r, W r], or the other way: parts of one are parts of both."""

    def signature(self, node: Node) -> Signature:
        names = self._names(node)
        return Signature(dict(zip(names, self._sizes(node))), (names,), names)

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        return (self._coarse(node, at) if node.op == "pixel_shuffle" else self._fine(node, at),)

    def writes(self, node: Node, at: At) -> Region:
        return self._fine(node, at) if node.op == "pixel_shuffle" else self._coarse(node, at)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        (x,) = inputs  # of formats with channels last torch's knows that of pictures only
        return call_op(call.node, [x if x.dim() == 4 else x.contiguous()])

    def _names(self, node: Node) -> tuple[str, ...]:
        lead = len(node.type.shape) - 3
        return ("n", *(f"x{dim}" for dim in range(1, lead)))[:lead] + ("c", "h", "w")

    def _sizes(self, node: Node) -> tuple[int, ...]:
        shuffles = node.op == "pixel_shuffle"
        coarse, fine = (node.input_types[0], node.type) if shuffles else (node.type, node.input_types[0])
        return (*fine.shape[:-2], *coarse.shape[-2:])

    def _factor(self, node: Node) -> int:
        return int(node["upscale_factor" if node.op == "pixel_shuffle" else "downscale_factor"])

    def _coarse(self, node: Node, at: At) -> Region:
        *lead, c, h, w = (at[name] for name in self._names(node))
        return Region((*lead, scaled(c, self._factor(node) ** 2), h, w))

    def _fine(self, node: Node, at: At) -> Region:
        *lead, c, h, w = (at[name] for name in self._names(node))
        return Region((*lead, c, scaled(h, self._factor(node)), scaled(w, self._factor(node))))

    def example(self, rng: random.Random) -> Example:
        factor, (c, h, w) = rng.randint(1, 3), (rng.randint(1, most) for most in (3, 5, 5))
        lead = [rng.randint(1, 3) for _ in range(rng.choice((0, 1, 1, 2)))]
        if rng.random() < 0.5:
            x = torch.randn(*lead, c * factor**2, h, w, dtype=torch.float64)
            return Example(torch_op("pixel_shuffle").default, (x, factor))
        x = torch.randn(*lead, c, h * factor, w * factor, dtype=torch.float64)
        return Example(torch_op("pixel_unshuffle").default, (x, factor))


class ChannelShuffle(Rule):
    """Channels change places: all but they may be split."""

    def signature(self, node: Node) -> Signature:
        n, c, *space = index_names(len(node.type.shape))
        dims: Dims = (n, None, *space)
        sizes = dict(zip((n, c, *space), node.type.shape))
        return Signature({name: sizes[name] for name in (n, *space)}, (dims,), dims)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return call_op(call.node, inputs)

    def example(self, rng: random.Random) -> Example:
        groups = rng.randint(1, 3)
        sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
        x = torch.randn(rng.randint(1, 3), groups * rng.randint(1, 3), *sizes, dtype=torch.float64)
        return Example(torch_op("channel_shuffle").default, (x, groups))


register(PixelShuffle(), "pixel_shuffle", "pixel_unshuffle")
register(ChannelShuffle(), "channel_shuffle", "native_channel_shuffle")
