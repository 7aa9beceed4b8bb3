"""Sampling at given places: the samples may be split, the sampled tensor is read whole but for batch and channels."""

import random

import torch
from torch import Tensor

from ..graph import Node
from .call_op import aten, call_op
from .rule import Call, Example, Rule, Signature, index_names, register


class GridSample(Rule):
    """`grid_sampler` of input [N, C, *in] at grid [N, *out, dims]."""

    def signature(self, node: Node) -> Signature:
        n, c, *space = index_names(len(node.type.shape))
        x = (n, c, *(None,) * len(space))
        return Signature(dict(zip((n, c, *space), node.type.shape)), (x, (n, *space, None)), (n, c, *space))

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return call_op(call.node, inputs)

    def example(self, rng: random.Random) -> Example:
        dims = rng.choice((2, 2, 3))
        n, c = rng.randint(1, 3), rng.randint(1, 3)
        x = torch.randn(n, c, *(rng.randint(1, 5) for _ in range(dims)), dtype=torch.float64)
        grid = torch.randn(n, *(rng.randint(1, 5) for _ in range(dims)), dims, dtype=torch.float64)
        mode = rng.randrange(3 if dims == 2 else 2)
        op = rng.choice(("grid_sampler", f"grid_sampler_{dims}d"))
        return Example(aten(f"aten.{op}.default"), (x, grid, mode, rng.randrange(3), rng.random() < 0.5))


class AffineGrid(Rule):
    """`affine_grid_generator`: for each sample the places [N, *out, dims] that a map [N, dims, dims + 1] gives."""

    def signature(self, node: Node) -> Signature:
        n, _, *space = index_names(len(node["size"]))
        return Signature(dict(zip((n, *space), node.type.shape)), ((n, None, None),), (n, *space, None))

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        (theta,) = inputs
        _, *space, _ = call.writes.intervals
        places = []
        for (first, last), size in zip(space, call.node.type.shape[1:]):
            places.append(_ticks(size, bool(call["align_corners"]), theta)[first:last])
        grid = torch.stack([*torch.meshgrid(*places, indexing="ij")][::-1], -1)
        ones = [1] * (len(space) - 1)
        turned = grid @ theta[:, :, :-1].mT.reshape(-1, *ones, len(space), len(space))
        return turned + theta[:, :, -1].reshape(-1, 1, *ones, len(space))

    def example(self, rng: random.Random) -> Example:
        dims = rng.choice((2, 3))
        n = rng.randint(1, 3)
        size = [n, rng.randint(1, 3), *(rng.randint(1, 5) for _ in range(dims))]
        theta = torch.randn(n, dims, dims + 1, dtype=torch.float64)
        return Example(aten("aten.affine_grid_generator.default"), (theta, size, rng.random() < 0.5))


def _ticks(size: int, align_corners: bool, like: Tensor) -> Tensor:
    """The centres of `size` cells between -1 and 1, or as many points with the ends on them."""
    if size <= 1:
        return like.new_zeros(size)
    ends = torch.linspace(-1, 1, size, dtype=like.dtype, device=like.device)
    return ends if align_corners else ends * (size - 1) / size


register(GridSample(), "grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
register(AffineGrid(), "affine_grid_generator")
