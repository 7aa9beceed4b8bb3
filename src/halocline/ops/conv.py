"""Convolution in 1, 2 and 3 dimensions: index space n, f (filters), and space."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..graph import Node
from ..region import Region, meet
from .kernels import Arguments, convolution_grads, convolve
from .rule import AdditiveRule, At, Call, Example, Grads, Signature, along, register, torch_op
from .window import Window

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


@dataclass(frozen=True)
class Part:
    """A convolution of one box of the input, as it was run: what its backward pass needs."""

    x: Tensor  # the box, cut or padded by `pads`
    weight: Tensor
    arguments: Arguments  # of the kernel: stride, padding and so on
    pads: list[int]  # zero padding (negative: cut off) applied before, as F.pad takes it
    with_bias: bool


class Convolution(AdditiveRule):
    """Dryden et al. (2019), algorithms 1 to 3: outputs `[h0, h1)` read `[h0 s - p, (h1 - 1) s - p + d (k - 1) + 1)`.

    What overhangs the tensor is the zero padding. Filters may be split where there is one group. By linearity the
    output is the sum of what each box of the input adds, its surroundings taken as zero: so the own block can be
    convolved in place while the halo is under way.
    """

    fresh = True

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

    def additive_dims(self, node: Node) -> tuple[int, ...]:
        dims = len(node.input_types[0].shape)
        return tuple(range(dims - len(windows(node)), dims))

    def forward(self, call: Call, inputs: Sequence[Tensor]) -> tuple[Tensor, Any]:
        _, output, saved = self.forward_box(call, call.reads[0], inputs, base=True)
        return output, saved

    def backward(self, call: Call, saved: Any, grad: Tensor) -> Grads:
        return self.backward_box(call, saved, grad)

    def forward_box(self, call: Call, box: Region, inputs: Sequence[Tensor], base: bool) -> tuple[Region, Tensor, Any]:
        x, weight = inputs[:2]
        key = box, base
        if key not in call.memo:
            call.memo[key] = self._geometry(call, box, base)
        region, padding, pads, arguments = call.memo[key]
        bias = call.given(inputs, "bias") if base else None
        if region.empty or box.empty:
            output = x.new_zeros(region.shape)
            return region, output if bias is None else output + bias.view(-1, *(1,) * len(padding)), None
        if any(pads):
            x = F.pad(x, pads)
        batched = len(region.intervals) == len(padding) + 2
        part = Part(x if batched else x[None], weight, arguments, pads, bias is not None)
        output = convolve(part.x, weight, bias, arguments)
        return region, output if batched else output[0], part if any(call.wanted) else None

    def _geometry(self, call: Call, box: Region, base: bool) -> tuple[Region, tuple[int, ...], list[int], Arguments]:
        """Where a box adds to the output, how it is padded by the kernel and before, and the kernel's arguments."""
        space = windows(call.node)
        first = len(call.writes.intervals) - len(space)
        outs, held = call.writes.intervals[first:], box.intervals[first:]
        if not base:
            outs = tuple(meet(out, window.reached_from(points)) for window, out, points in zip(space, outs, held))
        region = Region((*call.writes.intervals[:first], *outs))
        padding, *ends = zip(*(window.padding_for(*pair) for window, *pair in zip(space, held, outs)))
        pads = [pad for dim in reversed(list(zip(*ends))) for pad in dim]
        stride, dilation = [w.stride for w in space], [w.dilation for w in space]
        return region, padding, pads, (stride, padding, dilation, False, [0] * len(space), call["groups"])

    def backward_box(self, call: Call, saved: Any, grad: Tensor) -> Grads:
        if saved is None:
            return self._backward_of_nothing(call, grad)
        part: Part = saved
        batched = grad.dim() == part.x.dim()
        has_bias = "bias" in call.named
        wants_bias = part.with_bias and has_bias and call.wanted[call.named["bias"]]
        x_grad, *grads = convolution_grads(
            grad if batched else grad[None],
            part.x,
            part.weight,
            part.arguments,
            (call.wanted[0], call.wanted[1], wants_bias),
        )
        if x_grad is not None:
            x_grad = x_grad if batched else x_grad[0]
            x_grad = F.pad(x_grad, [-pad for pad in part.pads]) if any(part.pads) else x_grad
        return (x_grad, *grads)[: len(call.wanted)]

    def _backward_of_nothing(self, call: Call, grad: Tensor) -> Grads:
        """An empty box adds the bias only."""
        grads: list[Tensor | None] = [None] * len(call.wanted)
        if "bias" in call.named and call.wanted[call.named["bias"]]:
            filters = grad.dim() - len(windows(call.node)) - 1
            grads[call.named["bias"]] = grad.sum([dim for dim in range(grad.dim()) if dim != filters])
        return tuple(grads)

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
