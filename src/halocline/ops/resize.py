"""Resizing (`interpolate`) by nearest, linear and cubic interpolation: the index space is that of the output."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import PlanError
from ..graph import Node
from ..region import Region
from .call_op import call_op
from .pool import pool_dims
from .resample import Kernel, Resampling, ResizeMode, resampling_taps
from .rule import At, Call, Dims, Example, Grads, Rule, Signature, cut, index_names, register, torch_op
from .taps import Taps

MODES: dict[str, ResizeMode] = {
    "upsample_nearest1d": "nearest",
    "upsample_nearest2d": "nearest",
    "upsample_nearest3d": "nearest",
    "_upsample_nearest_exact1d": "nearest-exact",
    "_upsample_nearest_exact2d": "nearest-exact",
    "_upsample_nearest_exact3d": "nearest-exact",
    "upsample_linear1d": "linear",
    "upsample_bilinear2d": "linear",
    "upsample_trilinear3d": "linear",
    "upsample_bicubic2d": "cubic",
}
ANTIALIASED = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")


def scales(node: Node) -> tuple[float | None, ...]:
    """The scale that the user gave for each spatial dim, where the op is to use it."""
    dims = pool_dims(node)
    if "scale_factors" in node.attrs:
        return tuple(node["scale_factors"] or (None,) * dims)
    names = ("scales",) if dims == 1 else ("scales_d", "scales_h", "scales_w")[3 - dims :]
    return tuple(node.attrs.get(name) for name in names)


def resamplings(node: Node) -> tuple[Resampling, ...]:
    """How each spatial dim is resized."""
    dims, (source,), result = pool_dims(node), node.input_types, node.type
    real = np.float64 if source.dtype == torch.float64 else np.float32
    align = bool(node.attrs.get("align_corners", False))
    each = zip(source.shape[-dims:], result.shape[-dims:], scales(node))
    return tuple(Resampling(MODES[node.op], size, count, scale, align, real) for size, count, scale in each)


class Resize(Rule):
    """Positions are taken in the global tensor, so that a part weighs its inputs as the whole would.

    Growth by powers of two runs in ATen's own kernels, other sizes as gathers along one dim after the other. Both are
    linear: no tensor is kept for the backward pass, which is the adjoint of the same weights.
    """

    def signature(self, node: Node) -> Signature:
        if "nearest" not in node.op and not node.type.differentiable:
            raise PlanError(f"{node.where()} interpolates {node.type}; integers are not supported: convert to float.")
        names = index_names(len(node.type.shape))
        return Signature(dict(zip(names, node.type.shape)), (names,), names)

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        names = index_names(len(node.type.shape))
        space = (resampling.reads(at[name]) for resampling, name in zip(resamplings(node), names[2:]))
        return (Region((at[names[0]], at[names[1]], *space)),)

    def forward(self, call: Call, inputs: Sequence[Tensor]) -> tuple[Tensor, Any]:
        x = inputs[0]
        with torch.no_grad():
            if all(resampling.factor for resampling in resamplings(call.node)):
                return _grown(call, x), None
            y, kernel = x, _kernel(call.node, x)
            for dim, taps in _taps(call, kernel, x.device):
                y = taps.apply(y, dim)
            return y.to(x.dtype), kernel

    def backward(self, call: Call, saved: Kernel, grad: Tensor) -> Grads:
        if all(resampling.factor for resampling in resamplings(call.node)):
            return (_shrunk(call, grad),)
        x_grad = grad
        for dim, taps in reversed(list(_taps(call, saved, grad.device))):
            x_grad = taps.adjoint.apply(x_grad, dim)
        return (x_grad.to(grad.dtype),)

    def example(self, rng: random.Random) -> Example:
        op = rng.choice(list(MODES))
        dims = int(op[-2])
        sizes = [rng.randint(1, 9 if dims < 3 else 5) for _ in range(dims)]
        x = torch.randn(rng.randint(1, 3), rng.randint(1, 3), *sizes, dtype=torch.float64)
        align = [] if "nearest" in op else [rng.random() < 0.4]
        while True:
            given = [rng.choice((1.0, 2.0, 2.0, 3.0, 4.0, 0.5, 1.5, 1.7, rng.uniform(0.3, 3))) for _ in sizes]
            if rng.random() < 0.4:
                given = [rng.choice((1.0, 2.0, 4.0))] * dims
            size = [rng.randint(1, 20 if dims < 3 else 9) for _ in sizes]
            scales: list[float | None] = [None] * dims
            args: tuple[Any, ...] = (x, size, *align, None)
            if rng.random() < 0.5:
                args, scales = (x, None, *align, given), [*given]
                size = [int(size * scale) for size, scale in zip(sizes, given)]
            if all(size) and all(map(_unambiguous, [op] * dims, sizes, size, scales)):
                return Example(torch_op(op).vec, args)


def is_unambiguous(node: Node) -> bool:
    """Whether torch's gradient of a resized fp64 value goes to the inputs it was taken from: see `_unambiguous`."""
    return all(map(_ways_agree, resamplings(node)))


def _unambiguous(op: str, size: int, count: int, scale: float | None) -> bool:
    """Whether ATen's ways to find the nearest fp64 input agree: where they do not, its gradient is another's."""
    return _ways_agree(Resampling(MODES[op], size, count, scale, False, np.float64))


def _ways_agree(resampling: Resampling) -> bool:
    return len({way.taps((0, resampling.count))[0].tobytes() for way in resampling.ways()}) == 1


def _taps(call: Call, kernel: Kernel, device: torch.device) -> Iterator[tuple[int, Taps]]:
    """The taps along every dim that changes."""
    intervals = zip(resamplings(call.node), call.writes.intervals[2:], call.reads[0].intervals[2:])
    for dim, (resampling, out, read) in enumerate(intervals, start=2):
        resampling = resampling.by(kernel)
        if not resampling.identity:
            yield dim, resampling_taps(resampling, out, read, device)


def _kernel(node: Node, x: Tensor) -> Kernel:
    """The kernel that ATen would use for the whole tensor of which `x` is a part; on the CPU it goes by size too."""
    if x.is_cuda:
        return "cuda"
    if x.dim() == 3:
        return "contiguous"
    format = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    last = x.is_contiguous(memory_format=format) and not x.is_contiguous() and node.type.shape[1] >= 4
    small = x.dim() == 4 and sum(node.type.shape[2:]) <= 128
    return "channels_last" if last or small else "contiguous"


def _arguments(call: Call) -> tuple[list[int], list[int], tuple[Any, ...]]:
    """For ATen's kernels: the factors, the size that this part's inputs grow to, and the arguments behind the sizes."""
    factors = [resampling.factor or 1 for resampling in resamplings(call.node)]
    size = [(stop - start) * factor for (start, stop), factor in zip(call.reads[0].intervals[2:], factors)]
    align = () if "nearest" in call.node.op else (False,)
    return factors, size, (*align, *map(float, factors))


def _grown(call: Call, x: Tensor) -> Tensor:
    """All outputs that the inputs grow to, cropped to those that are wanted: the others lack inputs."""
    factors, size, more = _arguments(call)
    y = torch_op(call.node.op).default(x, size, *more)
    spaces = zip(factors, call.writes.intervals[2:], call.reads[0].intervals[2:])
    for dim, (factor, out, read) in enumerate(spaces, start=2):
        y = cut(y, dim, out[0] - read[0] * factor, out[1] - out[0])
    return y


def _shrunk(call: Call, grad: Tensor) -> Tensor:
    """The adjoint of `_grown`."""
    factors, size, more = _arguments(call)
    pads: list[int] = []
    for factor, out, read in zip(factors, call.writes.intervals[2:], call.reads[0].intervals[2:]):
        pads = [out[0] - read[0] * factor, read[1] * factor - out[1], *pads]
    grad = F.pad(grad, pads) if any(pads) else grad
    return torch_op(f"{call.node.op}_backward").default(grad, size, call.reads[0].shape, *more)


class ImageWise(Rule):
    """Antialiased resizing: whole images, split over samples and channels."""

    def signature(self, node: Node) -> Signature:
        dims: Dims = ("n", "c", *(None,) * (len(node.type.shape) - 2))
        return Signature(dict(zip(("n", "c"), node.type.shape)), (dims,), dims)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return call_op(call.node, inputs)

    def example(self, rng: random.Random) -> Example:
        x = torch.randn(rng.randint(1, 3), rng.randint(1, 3), rng.randint(2, 8), rng.randint(2, 8), dtype=torch.float64)
        op = torch_op(rng.choice(ANTIALIASED))
        return Example(op.vec, (x, [rng.randint(1, 9), rng.randint(1, 9)], rng.random() < 0.5, None))


register(Resize(), *MODES)
register(ImageWise(), *ANTIALIASED)
