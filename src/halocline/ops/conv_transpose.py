"""Transposed convolution in 1, 2 and 3 dimensions: index space n, f (filters), and the space of the output."""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..graph import Node
from ..region import Interval, Region, meet
from .conv import SPACE, per_dim
from .rule import At, Call, Dims, Example, Rule, Signature, along, cut, register, torch_op


@dataclass(frozen=True)
class Spread:
    """Along one dim, input `i` adds to outputs `i stride - padding + t dilation` for every tap `t` of `kernel`."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    size: int  # of the input dim

    @property
    def reach(self) -> int:
        return self.dilation * (self.kernel - 1)

    def reads(self, out: Interval) -> Interval:
        """The inputs that add to outputs `out`; none where `out` lies between the outputs of two inputs."""
        if out[1] <= out[0]:
            return 0, 0
        first = -(-(out[0] + self.padding - self.reach) // self.stride)
        return meet((0, self.size), (first, (out[1] - 1 + self.padding) // self.stride + 1))

    def makes(self, read: Interval) -> Interval:
        """The outputs from the first to the last that inputs `read` add to."""
        return read[0] * self.stride - self.padding, (read[1] - 1) * self.stride - self.padding + self.reach + 1


def spreads(node: Node) -> tuple[Spread, ...]:
    """How inputs spread along each spatial dim."""
    kernel = node.input_types[1].shape[2:]
    stride, padding, dilation = (per_dim(node[name], len(kernel)) for name in ("stride", "padding", "dilation"))
    return tuple(map(Spread, kernel, stride, padding, dilation, node.input_types[0].shape[-len(kernel) :]))


class TransposedConvolution(Rule):
    """Outputs `[h0, h1)` read inputs `ceil((h0 + p - d (k - 1)) / s)` to `floor((h1 - 1 + p) / s)`.

    What those inputs add beyond `[h0, h1)` is cropped. Filters may be split where there is one group.
    """

    def signature(self, node: Node) -> Signature:
        space = SPACE[5 - len(node.input_types[1].shape) :]
        sample = ("n",) if len(node.input_types[0].shape) == len(space) + 2 else ()
        filters = "f" if node["groups"] == 1 else None
        output: Dims = (*sample, filters, *space)
        indices = {name: size for name, size in zip(output, node.type.shape) if name}
        weight = (None, filters, *(None for _ in space))
        return Signature(indices, ((*sample, None, *space), weight, (filters,))[: len(node.inputs)], output)

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        dims = self.signature(node).inputs
        x, *rest = (along(type, names, at) for type, names in zip(node.input_types, dims, strict=True))
        space = spreads(node)
        intervals = tuple(spread.reads(at[name]) for spread, name in zip(space, SPACE[-len(space) :]))
        return Region((*x.intervals[: -len(space)], *intervals)), *rest

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        x, weight = inputs[:2]
        bias, space = call.given(inputs, "bias"), spreads(call.node)
        outs, reads = (region.intervals[-len(space) :] for region in (call.writes, call.reads[0]))
        made = [spread.makes(read) for spread, read in zip(space, reads)]
        if 0 in x.shape:  # nothing adds to these outputs
            y = x.new_zeros(call.writes.shape)
            return y if bias is None else y + bias.view(-1, *[1] * len(space))
        # The kernel crops both ends alike, or adds zeros behind; the rest is up to us.
        before = [out[0] - full[0] for out, full in zip(outs, made)]
        behind = [full[1] - out[1] for out, full in zip(outs, made)]
        padding = [max(0, min(ends)) for ends in zip(before, behind)]
        more = [max(0, -end) for end in behind]
        gap = any(start < 0 for start in before)
        conv = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(space) - 1]
        y = conv(x, weight, None if gap else bias, call["stride"], padding, more, call["groups"], call["dilation"])
        for dim, (start, pad, (low, high)) in enumerate(zip(before, padding, outs), start=y.dim() - len(space)):
            y = cut(y, dim, max(0, start - pad), min(high - low, high - low + start))
        if gap:
            y = F.pad(y, [pad for start in reversed(before) for pad in (max(0, -start), 0)])
            y = y if bias is None else y + bias.view(-1, *[1] * len(space))
        return y

    def example(self, rng: random.Random) -> Example:
        dims = rng.choice((1, 2, 2, 3))
        groups, stride = rng.choice((1, 1, 2, 4)), [rng.randint(1, 4) for _ in range(dims)]
        dilation, kernel = [rng.randint(1, 3) for _ in range(dims)], [rng.randint(1, 4) for _ in range(dims)]
        channels, filters = groups * rng.randint(1, 3), rng.randint(1, 3)
        more = [rng.randrange(max(s, d)) for s, d in zip(stride, dilation)]
        reach = [d * (k - 1) for d, k in zip(dilation, kernel)]
        padding = [rng.randint(0, min(3, (span + extra) // 2)) for span, extra in zip(reach, more)]
        sizes = [rng.randint(1, 7 if dims < 3 else 3) for _ in range(dims)]
        x = torch.randn(rng.randint(1, 3), channels, *sizes, dtype=torch.float64)
        weight = torch.randn(channels, filters, *kernel, dtype=torch.float64)
        bias = torch.randn(filters * groups, dtype=torch.float64) if rng.random() < 0.5 else None
        if rng.random() < 0.1:
            x = x[0]
        op = torch_op(f"conv_transpose{dims}d")
        target = op.default if dims == 1 else op.input
        return Example(target, (x, weight, bias, stride, padding, more, groups, dilation))


register(TransposedConvolution(), "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
