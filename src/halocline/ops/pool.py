"""Max and average pooling over sliding windows, and max unpooling: index space n, c and space."""

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import PlanError
from ..graph import Node
from ..region import Interval, Region
from .call_op import call_op
from .conv import SPACE, per_dim
from .rule import At, Call, Example, Rule, Signature, cut, register, torch_op
from .window import Window


def pool_dims(node: Node) -> int:
    """How many spatial dims the node's op has, read off its name (`max_pool2d_with_indices`: 2)."""
    return int(next(letter for letter in node.op if letter.isdigit()))


def pool_names(node: Node) -> tuple[str, ...]:
    """The indices along the dims of a pooled value: n (where there are samples), c, then space."""
    dims = pool_dims(node)
    return ("n", "c")[dims + 2 - len(node.type.shape) :] + SPACE[3 - dims :]


def pool_windows(node: Node) -> tuple[Window, ...]:
    """The window of a pooling op along each spatial dim."""
    dims = pool_dims(node)
    kernel = per_dim(node["kernel_size"], dims)
    stride = per_dim(node["stride"], dims) or kernel
    dilation = per_dim(node.attrs.get("dilation", 1), dims)
    padding, sizes = per_dim(node["padding"], dims), node.input_types[0].shape[-dims:]
    return tuple(map(Window, kernel, stride, padding, dilation, sizes))


def overhang(window: Window, out: Interval) -> tuple[int, int]:
    """How far outputs `out` read before the tensor's start and behind its end."""
    start, stop = window.spans(out)
    return max(0, -start), max(0, stop - window.size)


def padded_behind(
    x: Tensor, overhangs: Sequence[tuple[int, int]], value: float, least: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """`x` padded with `value` behind the end, so that a kernel's own padding on both sides covers `overhangs`.

    Returns also that padding: what the windows read before the start. Most parts are not copied; one that is smaller
    than `least` (the kernels of some ops refuse to pad it) is padded on both sides.
    """
    if any(size < kernel for size, kernel in zip(x.shape[-len(least) :], least)):
        x = F.pad(x, [pad for overhang in reversed(overhangs) for pad in overhang], value=value)
        return x, [0] * len(least)
    rest = [pad for before, behind in reversed(overhangs) for pad in (0, max(0, behind - before))]
    if any(rest):
        x = F.pad(x, rest, value=value)
    return x, [before for before, _ in overhangs]


def cropped(y: Tensor, intervals: Sequence[Interval]) -> Tensor:
    """The first outputs along the last dims, as many as each of `intervals` has: padding may have made more."""
    for dim, (start, stop) in enumerate(intervals, start=y.dim() - len(intervals)):
        y = cut(y, dim, 0, stop - start)
    return y


class Pooling(Rule):
    """Outputs `[h0, h1)` read what their windows cover; what overhangs the tensor is the padding."""

    def signature(self, node: Node) -> Signature:
        names = pool_names(node)
        return Signature(dict(zip(names, node.type.shape)), (names,), names)

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        names, windows = pool_names(node), pool_windows(node)
        lead, space = names[: -len(windows)], names[-len(windows) :]
        return (
            Region((*(at[name] for name in lead), *(window.reads(at[name]) for window, name in zip(windows, space)))),
        )

    def space(self, call: Call) -> tuple[list[Interval], list[tuple[int, int]]]:
        """The outputs to make along each spatial dim, and how far their windows overhang the tensor."""
        windows = pool_windows(call.node)
        intervals = [call.at[name] for name in pool_names(call.node)[-len(windows) :]]
        return intervals, [overhang(window, out) for window, out in zip(windows, intervals)]


class MaxPooling(Pooling):
    """Maxima, and their flat indices in the global tensor. Of equal values the first counts, on any split."""

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        windows = pool_windows(call.node)
        intervals, overhangs = self.space(call)
        dtype = call.node.type.dtype if call.node.output != 1 else inputs[0].dtype
        lowest: float = -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min
        x, padding = padded_behind(inputs[0], overhangs, lowest, [1] * len(windows))
        kernel, stride, dilation = zip(*((w.kernel, w.stride, w.dilation) for w in windows))
        result = torch_op(call.node.op)(x, kernel, stride, padding, dilation, False)
        if call.node.output != 1:
            return cropped(result if call.node.output is None else result[0], intervals)
        starts = [start for start, _ in call.reads[0].intervals[-len(windows) :]]
        return global_flat(cropped(result[1], intervals), x.shape[-len(windows) :], starts, [w.size for w in windows])

    def example(self, rng: random.Random) -> Example:
        dims, x, kernel, stride, padding, dilation = example_windows(rng, most=3)
        if rng.random() < 0.4:
            x = x.round()  # ties
        if rng.random() < 0.2:
            x = x.masked_fill(torch.rand_like(x) < 0.5, -torch.inf)
        target = torch_op(f"max_pool{dims}d" + rng.choice(("", "_with_indices"))).default
        return Example(target, (x, kernel, stride, padding, dilation, rng.random() < 0.5))


def global_flat(flat: Tensor, local: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Flat indices in a box of shape `local` at `starts`, as flat indices in the tensor of shape `sizes` around it."""
    total, stride = torch.zeros_like(flat), 1
    for extent, start, size in zip(reversed(local), reversed(starts), reversed(sizes)):
        total += (flat % extent + start) * stride
        flat, stride = flat // extent, stride * size
    return total


class AveragePooling(Pooling):
    """Averages. The divisor of every output is counted in the global tensor, where its window may be cut off."""

    def signature(self, node: Node) -> Signature:
        if not node.type.differentiable:
            raise PlanError(f"{node.where()} averages {node.type}; integers are not supported: convert to float first.")
        return super().signature(node)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        windows = pool_windows(call.node)
        intervals, overhangs = self.space(call)
        kernel, stride = zip(*((w.kernel, w.stride) for w in windows))
        x, padding = padded_behind(inputs[0], overhangs, 0.0, kernel)
        override = call.node.attrs.get("divisor_override")
        more: tuple[Any, ...] = () if len(windows) == 1 else (override,)
        y = cropped(torch_op(call.node.op)(x, kernel, stride, padding, False, True, *more), intervals)
        if override is None:
            for dim, (window, out) in enumerate(zip(windows, intervals), start=y.dim() - len(windows)):
                y = recounted(y, dim, window, out, bool(call["count_include_pad"]))
        return y

    def example(self, rng: random.Random) -> Example:
        dims, x, kernel, stride, padding, _ = example_windows(rng, most=1)
        ceil, include = rng.random() < 0.5, rng.random() < 0.5
        override = [] if dims == 1 else [rng.choice((None, None, 1, 5))]
        target = torch_op(f"avg_pool{dims}d").default
        return Example(target, (x, kernel, stride, padding, ceil, include, *override))


def recounted(y: Tensor, dim: int, window: Window, out: Interval, include_pad: bool) -> Tensor:
    """Averages over whole windows `y` [.. O ..], divided along `dim` by the count of what each window holds instead."""
    factors = count_factors(window, out, include_pad)
    if factors is None:
        return y
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    shape = [1] * y.dim()
    shape[dim] = -1
    return (y * torch.tensor(factors, dtype=wide, device=y.device).view(shape)).to(y.dtype)


@lru_cache(maxsize=4096)
def count_factors(window: Window, out: Interval, include_pad: bool) -> tuple[float, ...] | None:
    """For each output the window's size over what it holds; None when all are whole.

    The padding counts if asked for, but not what a last window covers beyond it (`ceil_mode`).
    """
    low, high = (-window.padding, window.size + window.padding) if include_pad else (0, window.size)
    starts = [o * window.stride - window.padding for o in range(*out)]
    counts = [min(start + window.kernel, high) - max(start, low) for start in starts]
    return None if set(counts) <= {window.kernel} else tuple(window.kernel / count for count in counts)


class MaxUnpooling(Rule):
    """Puts values where their flat indices say, which may be anywhere in the image: samples and channels split."""

    def signature(self, node: Node) -> Signature:
        dims = pool_dims(node)
        lead = pool_names(node)[:-dims]
        names = (*lead, *(None,) * dims)
        return Signature(dict(zip(lead, node.type.shape)), (names, names), names)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return call_op(call.node, inputs)

    def example(self, rng: random.Random) -> Example:
        dims = rng.choice((2, 3))
        x = torch.randn(*(rng.randint(1, 3) for _ in range(rng.randint(1, 2))), *(6,) * dims, dtype=torch.float64)
        values, where = torch_op(f"max_pool{dims}d_with_indices")(x, [2] * dims)
        size = [rng.randint(6, 8)] + [6] * (dims - 1)
        if dims == 2:
            return Example(torch_op("max_unpool2d").default, (values, where, size))
        return Example(torch_op("max_unpool3d").default, (values, where, size, [2] * 3, [0] * 3))


def example_windows(rng: random.Random, most: int) -> tuple[int, Tensor, list[int], list[int], list[int], list[int]]:
    """Spatial dims, an input and windows that fit it, with dilations up to `most`."""
    dims = rng.choice((1, 2, 2, 3))
    kernel = [rng.randint(1, 5 if dims < 3 else 3) for _ in range(dims)]
    stride = [] if rng.random() < 0.2 else [rng.randint(1, 4) for _ in range(dims)]
    dilation = [rng.randint(1, most) for _ in range(dims)]
    padding = [rng.randint(0, k // 2) for k in kernel]
    # Where a window has no tap inside the tensor, torch's own gradient writes out of bounds.
    least = [max(d, d * (k - 1) + 1 - 2 * p) for k, p, d in zip(kernel, padding, dilation)]
    if dims == 3:
        least = list(map(max, least, kernel))  # avg_pool3d refuses less
    sizes = [size + rng.randint(0, 9 if dims < 3 else 4) for size in least]
    lead = [rng.randint(1, 3) for _ in range(1 if rng.random() < 0.1 else 2)]
    return dims, torch.randn(*lead, *sizes, dtype=torch.float64), kernel, stride, padding, dilation


register(
    MaxPooling(), "max_pool1d", "max_pool2d", "max_pool3d",
    "max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices",
)  # fmt: skip
register(AveragePooling(), "avg_pool1d", "avg_pool2d", "avg_pool3d")
register(MaxUnpooling(), "max_unpool2d", "max_unpool3d")
