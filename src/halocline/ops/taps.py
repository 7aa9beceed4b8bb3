"""`Taps`: outputs along one dim as weighted sums of a few inputs each, and the adjoint of that."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

FEW = 8  # up to as many taps are added one by one; more are gathered at once


@dataclass(frozen=True, eq=False)
class Taps:
    """Output `o` is the sum over `t` of `weights[o, t]` times input `index[o, t]`; `size` inputs in all.

    No weights: one tap for each output, which is taken as it is.
    """

    index: Tensor  # int64 [O, T]
    weights: Tensor | None  # [O, T]
    size: int

    @classmethod
    def of(cls, index: np.ndarray, weights: np.ndarray | None, size: int, device: torch.device) -> "Taps":
        made = None if weights is None else torch.from_numpy(np.ascontiguousarray(weights)).to(device)
        return cls(torch.from_numpy(index.astype(np.int64)).to(device), made, size)

    def apply(self, x: Tensor, dim: int) -> Tensor:
        """`x` [.. I ..] to [.. O ..] along `dim`; of the dtype of `x` without weights, else wide enough for both."""
        if self.weights is None:
            return selected(x, dim, self.index[:, 0])
        shape = [1] * x.dim()
        shape[dim] = len(self.index)
        taps = self.index.shape[1]
        if taps > FEW:
            gathered = selected(x, dim, self.index.reshape(-1)).unflatten(dim, (len(self.index), taps))
            return (gathered * self.weights.view(*shape[: dim + 1], taps, *shape[dim + 1 :])).sum(dim + 1)
        total = selected(x, dim, self.index[:, 0]) * self.weights[:, 0].view(shape)
        for tap in range(1, taps):
            total += selected(x, dim, self.index[:, tap]) * self.weights[:, tap].view(shape)
        return total

    @cached_property
    def adjoint(self) -> "Taps":
        """From the gradient of the outputs to that of the inputs: gathers too, since scattering is slow."""
        weights = torch.ones(self.index.shape) if self.weights is None else self.weights.cpu()
        outputs, slots = np.nonzero(weights.numpy())
        inputs, values = self.index.cpu().numpy()[outputs, slots], weights.numpy()[outputs, slots]
        order = np.argsort(inputs, kind="stable")
        outputs, inputs, values = outputs[order], inputs[order], values[order]
        counts = np.bincount(inputs, minlength=self.size)
        slots = np.arange(len(inputs)) - (np.cumsum(counts) - counts)[inputs]
        index = np.zeros((self.size, max(1, counts.max(initial=0))), np.int64)
        table = np.zeros(index.shape, values.dtype)
        index[inputs, slots], table[inputs, slots] = outputs, values
        return Taps.of(index, table, len(self.index), self.index.device)


def selected(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """`x.index_select(dim, index)` in the memory format of `x`; along the last dim `gather` is many times faster."""
    if x.dim() > 3 and x.stride(1) == 1 and not x.is_contiguous():
        places = (0, *range(2, x.dim()), 1)
        back = (0, x.dim() - 1, *range(1, x.dim() - 1))
        return x.permute(places).index_select(places.index(dim), index).permute(back)
    if dim == x.dim() - 1:
        return x.gather(dim, index.expand(*x.shape[:-1], len(index)))
    return x.index_select(dim, index)
