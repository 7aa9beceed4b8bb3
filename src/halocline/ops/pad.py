"""Padding and cropping: the index space is that of the output."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..graph import Node
from ..region import Interval, Region, meet
from .rule import At, Call, Example, Rule, Signature, cut, index_names, register, torch_op

Mode = Literal["constant", "reflect", "replicate", "circular"]
MODES: dict[str, Mode] = {
    "constant_pad_nd": "constant",
    "reflection_pad1d": "reflect",
    "reflection_pad2d": "reflect",
    "reflection_pad3d": "reflect",
    "replication_pad1d": "replicate",
    "replication_pad2d": "replicate",
    "replication_pad3d": "replicate",
    "_pad_circular": "circular",
}


@dataclass(frozen=True)
class Padding:
    """A dim of `size` entries that gets `before` and `behind` more at its ends (negative: loses them)."""

    mode: Mode
    size: int
    before: int
    behind: int

    @property
    def inner(self) -> Interval:
        """The outputs that are entries of the input themselves."""
        start = max(self.before, 0)
        return start, max(start, self.size + self.before + min(self.behind, 0))

    def source(self, out: int) -> int:
        """Which input entry output `out` shows."""
        at = out - self.before
        if self.mode == "circular":  # torch crops first and wraps what is left
            start, stop = self.inner
            return max(-self.before, 0) + (out - start) % (stop - start)
        if self.mode == "reflect":
            return -at if at < 0 else min(at, 2 * (self.size - 1) - at)
        return min(max(at, 0), self.size - 1)

    def runs(self, out: Interval) -> list[Interval]:
        """`out` cut where padding and input meet; within each of the up to three runs sources are in sequence."""
        start, stop = self.inner
        runs = [meet(out, (out[0], start)), meet(out, (start, stop)), meet(out, (stop, out[1]))]
        return [run for run in runs if run[0] < run[1]]

    def reads(self, out: Interval) -> Interval:
        """The hull of the inputs that `out` shows."""
        if self.mode == "constant":
            return meet((0, self.size), (out[0] - self.before, out[1] - self.before))
        ends = [self.source(end) for run in self.runs(out) for end in (run[0], run[1] - 1)]
        return (min(ends), max(ends) + 1) if ends else (0, 0)

    def padded(self, x: Tensor, dim: int, out: Interval, start: int) -> Tensor:
        """Outputs `out`, made of `x`, which holds the inputs that they show from `start` on."""
        pieces = []
        for run in self.runs(out):
            first, last = sorted((self.source(run[0]), self.source(run[1] - 1)))
            piece = cut(x, dim, first - start, last + 1 - first)
            if self.source(run[0]) > first:
                piece = piece.flip(dim)
            elif last - first < run[1] - 1 - run[0]:
                piece = piece.expand([-1 if d != dim else run[1] - run[0] for d in range(x.dim())])
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def paddings(node: Node) -> tuple[Padding, ...]:
    """The padding of every dim of the node's input."""
    mode = MODES.get(node.op) or node["mode"]
    pads = list(node.attrs["pad"] if "pad" in node.attrs else node["padding"])
    sizes = node.input_types[0].shape
    ends = [(0, 0)] * (len(sizes) - len(pads) // 2) + list(zip(pads[0::2], pads[1::2]))[::-1]
    return tuple(Padding(mode, size, *end) for size, end in zip(sizes, ends))


class Pad(Rule):
    """Each part pads what it has of the global edges. A part that shows both ends of a dim reads their hull.

    So with circular padding the two outer parts read the whole dim; concatenating slices instead reads only the ends.
    """

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        return Signature(dict(zip(names, node.type.shape)), (names,), names)

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        names = index_names(len(node.type.shape))
        return (Region(tuple(padding.reads(at[name]) for padding, name in zip(paddings(node), names))),)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        x, outs, reads = inputs[0], call.writes.intervals, call.reads[0].intervals
        if paddings(call.node)[0].mode == "constant":
            return self._filled(call, x)
        for dim, padding in enumerate(paddings(call.node)):
            x = padding.padded(x, dim, outs[dim], reads[dim][0])
        return x

    def _filled(self, call: Call, x: Tensor) -> Tensor:
        pads: list[int] = []
        for padding, out, read in zip(paddings(call.node), call.writes.intervals, call.reads[0].intervals):
            before = min(max(0, padding.before - out[0]), out[1] - out[0])
            pads = [before, out[1] - out[0] - before - (read[1] - read[0]), *pads]
        return F.pad(x, pads, value=call["value"] or 0.0) if any(pads) else x.view_as(x)

    def example(self, rng: random.Random) -> Example:
        modes: tuple[Mode, ...] = ("constant", "reflect", "replicate", "circular")
        mode = rng.choice(modes)
        dims = rng.randint(1, 3)
        sizes = [rng.randint(1, 3) for _ in range(rng.randint(1, 2))]
        sizes += [rng.randint(1, 9 if dims < 3 else 5) for _ in range(dims)]
        if mode == "constant":
            dims = rng.randint(1, len(sizes))
        elif mode == "circular":
            sizes = [rng.randint(1, 3), *sizes[-dims - 1 :]]  # it must be batched
        pads = [pad for size in sizes[: -dims - 1 : -1] for pad in _example_pads(rng, mode, size)]
        x = torch.randn(sizes, dtype=torch.float64)
        value = rng.choice((None, 1.5)) if mode == "constant" else None
        return Example(*rng.choice(_example_calls(x, dims, pads, mode, value)))


def _example_pads(rng: random.Random, mode: Mode, size: int) -> tuple[int, int]:
    most = {"constant": 4, "reflect": size - 1, "replicate": 4, "circular": size}[mode]
    pads = rng.randint(0, most), rng.randint(0, most)
    if rng.random() < 0.3 and size > 2:  # crop
        crop = rng.randint(1, size // 3)
        other = min(pads[0], size - crop)
        pads = rng.choice(((-crop, other), (other, -crop), (-crop, -crop)))
    return pads


def _example_calls(
    x: Tensor, dims: int, pads: Sequence[int], mode: Mode, value: float | None
) -> list[tuple[Any, tuple[Any, ...]]]:
    calls: list[tuple[Any, tuple[Any, ...]]] = [(torch_op("pad").default, (x, pads, mode, value))]
    if mode == "constant":
        calls.append((torch_op("constant_pad_nd").default, (x, pads, value or 0)))
    elif mode == "circular":
        calls.append((torch_op("_pad_circular").default, (x, pads)))
    else:
        op = {"reflect": "reflection_pad", "replicate": "replication_pad"}[mode]
        calls.append((torch_op(f"{op}{dims}d").default, (x, pads)))
    return calls


register(Pad(), "pad", *MODES)
