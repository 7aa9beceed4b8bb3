"""Convolution in 1, 2 and 3 dimensions: index space n, f (filters), and space."""

import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..graph import Node
from ..region import Region
from .rule import At, Call, Example, Rule, Signature, along, register, torch_op
from .window import Window, pad_overhang

SPACE = ("d", "h", "w")


def per_dim(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """An argument that may be given once for all dims."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def windows(node: Node) -> tuple[Window, ...]:
    """The window of a convolution along each spatial dim."""
    weight = node.input_types[1].shape
    dims = len(weight) - 2
    stride, dilation = per_dim(node["stride"], dims), per_dim(node["dilation"], dims)
    kernel, sizes = weight[2:], node.input_types[0].shape[-dims:]
    if node["padding"] == "same":  # torch puts the odd one at the end
        padding = tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel))
    elif node["padding"] == "valid":
        padding = (0,) * dims
    else:
        padding = per_dim(node["padding"], dims)
    return tuple(map(Window, kernel, stride, padding, dilation, sizes))


class Convolution(Rule):
    """Dryden et al. (2019), algorithm 1: outputs `[h0, h1)` read inputs `[h0 s - p, (h1 - 1) s - p + d (k - 1) + 1)`.

    What overhangs the tensor is the zero padding. Filters may be split where there is one group.
    """

    def signature(self, node: Node) -> Signature:
        space = SPACE[5 - len(node.input_types[1].shape) :]
        batched = len(node.input_types[0].shape) == len(space) + 2
        sample = ("n",) if batched else ()
        filters = "f" if node["groups"] == 1 else None
        output = (*sample, filters, *space)
        indices = {name: size for name, size in zip(output, node.type.shape) if name}
        weight = (filters, None, *(None for _ in space))
        return Signature(indices, ((*sample, None, *space), weight, (filters,))[: len(node.inputs)], output)

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        dims = self.signature(node).inputs
        x, *rest = (along(type, names, at) for type, names in zip(node.input_types, dims, strict=True))
        space = windows(node)
        intervals = tuple(window.reads(at[name]) for window, name in zip(space, SPACE[-len(space) :]))
        return Region((*x.intervals[: -len(space)], *intervals)), *rest

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        x, weight = inputs[:2]
        space = windows(call.node)
        overhangs = [window.overhang(call.at[name]) for window, name in zip(space, SPACE[-len(space) :])]
        x, padding = pad_overhang(x, overhangs, 0.0)
        bias = call.given(inputs, "bias")
        conv = (F.conv1d, F.conv2d, F.conv3d)[len(space) - 1]
        return conv(x, weight, bias, call["stride"], padding, call["dilation"], call["groups"])

    def example(self, rng: random.Random) -> Example:
        dims = rng.choice((1, 2, 2, 3))
        groups, stride = rng.choice((1, 1, 2, 4)), [rng.randint(1, 3) for _ in range(dims)]
        dilation, kernel = [rng.randint(1, 2) for _ in range(dims)], [rng.randint(1, 4) for _ in range(dims)]
        channels, filters = groups * rng.randint(1, 3), groups * rng.randint(1, 3)
        padding: list[int] | str = [rng.randint(0, 3) for _ in range(dims)]
        if rng.random() < 0.2:
            padding = rng.choice(("valid", "same")) if stride == [1] * dims else "valid"
        sizes = [d * (k - 1) + 1 + rng.randint(0, 9 if dims < 3 else 4) for d, k in zip(dilation, kernel)]
        x = torch.randn(rng.randint(1, 3), channels, *sizes, dtype=torch.float64)
        weight = torch.randn(filters, channels // groups, *kernel, dtype=torch.float64)
        bias = torch.randn(filters, dtype=torch.float64) if rng.random() < 0.5 else None
        if rng.random() < 0.1:
            x = x[0]
        op = torch_op(f"conv{dims}d")
        target = op.padding if isinstance(padding, str) else op.default
        return Example(target, (x, weight, bias, stride, padding, dilation, groups))


register(Convolution(), "conv1d", "conv2d", "conv3d")
