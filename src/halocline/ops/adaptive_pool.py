"""Pooling to a given size. Along dims that become one, every part of the input may be elsewhere: partial sums meet."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..graph import Node
from ..region import Interval, Region
from .pool import global_flat, pool_dims, pool_names
from .rule import At, Call, Example, Reduction, Signature, StagedRule, Stages, register, torch_op
from .taps import Taps

NOWHERE = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Windows:
    """`count` windows over `size` inputs: window `o` is `[floor(o size / count), ceil((o + 1) size / count))`."""

    size: int
    count: int

    def starts(self, out: Interval) -> np.ndarray:
        return np.arange(*out) * self.size // self.count

    def stops(self, out: Interval) -> np.ndarray:
        return -(-(np.arange(*out) + 1) * self.size // self.count)

    def reads(self, out: Interval) -> Interval:
        """The inputs in the windows `out`."""
        return (int(self.starts(out)[0]), int(self.stops(out)[-1])) if out[0] < out[1] else (0, 0)


@lru_cache(maxsize=1024)
def window_taps(windows: Windows, out: Interval, wide: torch.dtype, device: torch.device) -> Taps:
    """The averages over the windows `out`. Shorter windows repeat their last input, with weight zero."""
    starts, stops = windows.starts(out)[:, None], windows.stops(out)[:, None]
    index = starts + np.arange((stops - starts).max(initial=1))
    weights = np.where(index < stops, 1 / (stops - starts), 0.0)
    low, high = windows.reads(out)
    taps = np.minimum(index, stops - 1) - low
    return Taps.of(taps, weights.astype(np.float64 if wide == torch.float64 else np.float32), high - low, device)


class AdaptivePooling(StagedRule):
    """What the average and the maximum share: along dims that become one the index runs over the input."""

    def signature(self, node: Node) -> Signature:
        names, single = pool_names(node), self.single(node)
        sizes = [
            node.input_types[0].shape[dim] if name in single else size
            for dim, (name, size) in enumerate(zip(names, node.type.shape))
        ]
        return Signature(dict(zip(names, sizes)), (names,), tuple(None if n in single else n for n in names))

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        windows = self.windows(node)
        return (
            Region(tuple(windows[name].reads(at[name]) if name in windows else at[name] for name in pool_names(node))),
        )

    def single(self, node: Node) -> tuple[str, ...]:
        """The spatial indices whose dim becomes one."""
        space = pool_names(node)[-pool_dims(node) :]
        return tuple(name for name, size in zip(space, node.type.shape[-len(space) :]) if size == 1)

    def windows(self, node: Node) -> dict[str, Windows]:
        """The windows along every other spatial dim."""
        space, single = pool_names(node)[-pool_dims(node) :], self.single(node)
        sizes = zip(node.input_types[0].shape[-len(space) :], node.type.shape[-len(space) :])
        return {name: Windows(*size) for name, size in zip(space, sizes) if name not in single}

    def example_input(self, rng: random.Random) -> tuple[int, Tensor, list[int]]:
        dims = rng.choice((1, 2, 2, 3))
        sizes = [rng.randint(1, 9 if dims < 3 else 5) for _ in range(dims)]
        result = [rng.choice((1, 1, size, rng.randint(1, 8))) for size in sizes]
        lead = [rng.randint(1, 3) for _ in range(1 if rng.random() < 0.1 else 2)]
        return dims, torch.randn(*lead, *sizes, dtype=torch.float64), result


class AdaptiveAverage(AdaptivePooling):
    """Averages; global pooling sums what each rank has and gathers nothing. Keeps nothing for the backward pass."""

    def reductions(self, node: Node) -> tuple[Reduction, ...]:
        return (Reduction("sum", self.single(node)),) if self.single(node) else ()

    def forward_stages(self, call: Call, inputs: Sequence[Tensor]) -> Stages:
        x, reduced = inputs[0], self._reduced(call.node)
        y = x.sum(reduced, keepdim=True, dtype=wide_dtype(x)) if reduced else x
        for dim, taps in self._taps(call, wide_dtype(x), x.device):
            y = taps.apply(y, dim)
        if reduced:
            y = yield y / self._count(call.node)
        return y.to(x.dtype), None

    def backward_stages(self, call: Call, saved: None, grad: Tensor) -> Stages:
        yield from ()
        shape = call.reads[0].shape
        if 0 in shape:
            return (grad.new_zeros(shape),)
        x_grad = grad.to(wide_dtype(grad)) / self._count(call.node)
        for dim, taps in self._taps(call, x_grad.dtype, grad.device):
            x_grad = taps.adjoint.apply(x_grad, dim)
        return (x_grad.to(grad.dtype).expand(shape).contiguous(),)

    def _taps(self, call: Call, wide: torch.dtype, device: torch.device) -> Iterator[tuple[int, Taps]]:
        windows = self.windows(call.node)
        for dim, name in enumerate(pool_names(call.node)):
            if name in windows and windows[name].size != windows[name].count:
                yield dim, window_taps(windows[name], call.at[name], wide, device)

    def _reduced(self, node: Node) -> list[int]:
        return [dim for dim, name in enumerate(pool_names(node)) if name in self.single(node)]

    def _count(self, node: Node) -> int:
        return prod(node.input_types[0].shape[dim] for dim in self._reduced(node))

    def example(self, rng: random.Random) -> Example:
        dims, x, result = self.example_input(rng)
        return Example(torch_op(f"adaptive_avg_pool{dims}d").default, (x, result))


class AdaptiveMax(AdaptivePooling):
    """Maxima, and their flat indices in the global tensor; of equal values the first counts.

    Global pooling takes the maximum over the ranks, then the least index at which it was found.
    """

    def reductions(self, node: Node) -> tuple[Reduction, ...]:
        single = self.single(node)
        return (Reduction("max", single), Reduction("min", single)) if single else ()

    def forward_stages(self, call: Call, inputs: Sequence[Tensor]) -> Stages:
        x, node = inputs[0], call.node
        values, flat = self._local(call, x.to(wide_dtype(x)))
        if self.single(node):
            most = yield values.clone()
            here = (values == most) | values.isnan()
            flat = yield torch.where(here, flat, NOWHERE)
            values = most
        return (flat if node.output == 1 else values.to(x.dtype)), (flat if any(call.wanted) else None)

    def _local(self, call: Call, x: Tensor) -> tuple[Tensor, Tensor]:
        """Maxima of this rank's part and where they are. The last dim comes first: so the first of equals stays."""
        node, names, dims = call.node, pool_names(call.node), pool_dims(call.node)
        starts, sizes = [start for start, _ in call.reads[0].intervals], node.input_types[0].shape
        flat = torch.arange(prod(x.shape[-dims:]), device=x.device).view(x.shape[-dims:])
        flat = global_flat(flat, x.shape[-dims:], starts[-dims:], sizes[-dims:]).expand(x.shape)
        for dim in reversed(range(x.dim() - dims, x.dim())):
            if names[dim] in self.windows(node):
                taps = window_taps(self.windows(node)[names[dim]], call.at[names[dim]], x.dtype, x.device).index
                x, flat = (v.index_select(dim, taps.reshape(-1)).unflatten(dim, taps.shape) for v in (x, flat))
            else:
                x, flat = x.unsqueeze(dim), flat.unsqueeze(dim)
            x, flat = _first_max(x, flat, dim + 1)
        return x, flat

    def backward_stages(self, call: Call, saved: Tensor, grad: Tensor) -> Stages:
        yield from ()
        dims = pool_dims(call.node)
        box, sizes = call.reads[0], call.node.input_types[0].shape
        lead, space = box.shape[:-dims], box.shape[-dims:]
        inside, local, flat, stride = torch.ones_like(saved, dtype=torch.bool), torch.zeros_like(saved), saved, 1
        for (start, stop), size in zip(reversed(box.intervals[-dims:]), reversed(sizes[-dims:])):
            at = flat % size
            inside &= (start <= at) & (at < stop)
            local += (at - start) * stride
            flat, stride = flat // size, stride * (stop - start)
        x_grad = grad.new_zeros(*lead, prod(space))
        if x_grad.numel():
            local, grad = torch.where(inside, local, 0), torch.where(inside, grad, 0)
            x_grad.scatter_add_(-1, local.flatten(-dims), grad.flatten(-dims))
        return (x_grad.view(box.shape),)

    def example(self, rng: random.Random) -> Example:
        dims, x, result = self.example_input(rng)
        x = x.round() if rng.random() < 0.5 else x  # ties
        return Example(torch_op(f"adaptive_max_pool{dims}d").default, (x, result))


def _first_max(x: Tensor, flat: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The first maximum along `dim`, with its entry of `flat`; the least value and `NOWHERE` where there is none."""
    if x.shape[dim] == 0:
        shape = [1 if d == dim - 1 else size for d, size in enumerate(x.shape) if d != dim]
        return x.new_full(shape, -torch.inf), flat.new_full(shape, NOWHERE)
    values, at = x.max(dim, keepdim=True)
    return values.squeeze(dim), flat.gather(dim, at).squeeze(dim)


def wide_dtype(x: Tensor) -> torch.dtype:
    """What sums of `x` are kept in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


register(
    AdaptiveAverage(), "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
)  # fmt: skip
register(AdaptiveMax(), "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
