"""The mesh-tangling data: where will the mesh of a hydrodynamics simulation fold?

The data of Dryden et al. (2019) is not public, so this makes its like: a structured mesh of size x size quadrilaterals
whose nodes are carried by a random flow. A sample shows the mesh at time `SHOWN`, when it is deformed and a few cells
have folded already; the target marks the cells of which a corner Jacobian turns negative at any step until time 1.

Input channels, in this order: density, pressure, speed, volume fraction of the second material, and the 14 quality
metrics of `quad_quality.METRICS`. Materials are polytropic gases with exponents 2 and 3/2. All channels are clipped and
standardised by the constants in `CHANNELS`, never by statistics of a sample, and every cell is a function of its place
in the whole mesh, the seed and the sample's number: `sample` gives any region exactly as it is in the whole.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from halocline.data.flow import Flow, advance, draw_flow, velocity
from halocline.data.quad_quality import METRICS, minimum_jacobian, quads

Array = NDArray[np.float64]

SHOWN = 0.5  # half of the steps
_DISCS = 5
_TILE = 96


@dataclass(frozen=True)
class Channel:
    """A field as the network sees it: clipped to `low`..`high`, then less `centre`, over `spread`."""

    name: str
    low: float
    high: float
    centre: float
    spread: float


# Centres and spreads are about the mean and the standard deviation over meshes of 64 to 512 cells a side.
CHANNELS: tuple[Channel, ...] = (
    Channel("density", 0.0, 8.0, 1.4, 0.8),
    Channel("pressure", 0.0, 10.0, 1.2, 1.0),
    Channel("speed", 0.0, 0.1, 0.018, 0.014),
    Channel("volume fraction", 0.0, 1.0, 0.25, 0.43),
    Channel("area", -1.0, 4.0, 1.0, 0.4),
    Channel("aspect ratio", 1.0, 30.0, 4.0, 5.0),
    Channel("maximum edge ratio", 1.0, 15.0, 2.3, 2.0),
    Channel("skew", 0.0, 1.0, 0.5, 0.35),
    Channel("taper", 0.0, 2.0, 0.1, 0.15),
    Channel("stretch", 0.0, 1.0, 0.6, 0.25),
    Channel("minimum angle", 0.0, 90.0, 50.0, 30.0),
    Channel("maximum angle", 90.0, 360.0, 135.0, 32.0),
    Channel("oddy", 0.0, 100.0, 30.0, 35.0),
    Channel("condition number", 1.0, 30.0, 6.0, 8.0),
    Channel("minimum Jacobian", -4.0, 4.0, 0.6, 0.8),
    Channel("scaled Jacobian", -1.0, 1.0, 0.6, 0.4),
    Channel("shear", 0.0, 1.0, 0.6, 0.37),
    Channel("shape", 0.0, 1.0, 0.5, 0.37),
)


class MeshTangling(Dataset[tuple[Tensor, Tensor]]):
    """`length` meshes of `size` x `size` cells; item i is `(x[18, size, size], y[1, size, size])` in fp32.

    The same `seed` gives the same meshes; `sample` gives a region of one, without computing the rest.
    Raises `ValueError` for a size under 8 or a negative length.
    """

    def __init__(self, size: int, length: int, seed: int = 0) -> None:
        if size < 8 or length < 0:
            raise ValueError(
                f"MeshTangling: size {size}, length {length}. Give a size of at least 8, and a length >= 0."
            )
        self.size, self.length, self.seed = size, length, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.sample(i, (0, self.size), (0, self.size))

    def sample(self, i: int, rows: tuple[int, int], cols: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Rows `[h0, h1)` and columns `[w0, w1)` of item `i`: `(x[18, h1-h0, w1-w0], y[1, h1-h0, w1-w0])`.

        Bit for bit equal to that part of `self[i]`, at the cost of the region alone. Raises `IndexError` if there is
        no item `i`, or if the region does not lie within the mesh.
        """
        if not 0 <= i < self.length:
            raise IndexError(f"MeshTangling: item {i} of a data set of {self.length}")
        for name, (start, stop) in (("rows", rows), ("cols", cols)):
            if not 0 <= start <= stop <= self.size:
                raise IndexError(f"MeshTangling: {name} [{start}, {stop}) do not lie within [0, {self.size})")
        rng = np.random.default_rng([self.seed, i])
        flow, discs = draw_flow(rng, self.size), _draw_discs(rng, self.size)
        shape = (rows[1] - rows[0], cols[1] - cols[0])
        x = np.empty((len(CHANNELS), *shape), dtype=np.float32)
        y = np.empty((1, *shape), dtype=np.float32)
        # Tiles keep the work in cache, and few eddies reach a tile. They change no bit: cells are independent.
        for h in range(rows[0], rows[1], _TILE):
            for w in range(cols[0], cols[1], _TILE):
                h1, w1 = min(h + _TILE, rows[1]), min(w + _TILE, cols[1])
                at = (slice(h - rows[0], h1 - rows[0]), slice(w - cols[0], w1 - cols[0]))
                fields, tangles = _tile(self.size, flow, discs, (h, h1), (w, w1))
                for c, (channel, field) in enumerate(zip(CHANNELS, fields, strict=True)):
                    x[c, *at] = (np.clip(field, channel.low, channel.high) - channel.centre) / channel.spread
                y[0, *at] = tangles
        return torch.from_numpy(x), torch.from_numpy(y)


@dataclass(frozen=True)
class Disc:
    """A round drop of the second material in the undeformed mesh; lengths in cells."""

    x: float
    y: float
    radius: float


def _draw_discs(rng: np.random.Generator, size: int) -> tuple[Disc, ...]:
    return tuple(Disc(size * rng.uniform(), size * rng.uniform(), size * rng.uniform(0.08, 0.2)) for _ in range(_DISCS))


def steps(size: int) -> int:
    """Runge-Kutta steps to time 1, an even number: the faster turns of finer meshes need more of them."""
    return 2 * math.ceil(0.65 * math.sqrt(size))


def _tile(
    size: int, flow: Flow, discs: Sequence[Disc], rows: tuple[int, int], cols: tuple[int, int]
) -> tuple[list[Array], NDArray[np.bool_]]:
    count = steps(size)
    y, x = (a.copy() for a in np.broadcast_arrays(_nodes(rows)[:, None], _nodes(cols)[None, :]))
    fraction = _volume_fraction(discs, x, y)
    for k in range(count // 2):
        x, y = advance(flow, k / count, 1 / count, x, y)
    fields = _fields(size, flow, x, y, fraction)
    tangles = _smallest_jacobian(x, y) < 0.0
    for k in range(count // 2, count):
        x, y = advance(flow, k / count, 1 / count, x, y)
        tangles |= _smallest_jacobian(x, y) < 0.0
    return fields, tangles


def _nodes(cells: tuple[int, int]) -> Array:
    return np.arange(cells[0], cells[1] + 1, dtype=np.float64)


def _fields(size: int, flow: Flow, x: Array, y: Array, fraction: Array) -> list[Array]:
    q = quads(_corners(x), _corners(y))
    metrics = [metric(q) for metric in METRICS.values()]
    u, v = velocity(flow, SHOWN, x, y)
    # Four times the mean of a cell's nodes. Speeds grow as the cells across an eddy, to the power 3/2: see `draw_flow`.
    cell_u, cell_v = sum(_corners(u)), sum(_corners(v))
    speed = np.sqrt(cell_u * cell_u + cell_v * cell_v) * (0.25 / (size * math.sqrt(size)))
    # Mass is conserved: the first material starts with density 1 and the second with 2, in cells of area 1.
    compression = 1.0 / np.maximum(metrics[0], 0.1)
    density = (1.0 + fraction) * compression
    pressure = compression * ((1.0 - fraction) * compression + fraction * np.sqrt(compression))
    return [density, pressure, speed, fraction, *metrics]


def _volume_fraction(discs: Sequence[Disc], x: Array, y: Array) -> Array:
    """Share of the second material in each undeformed cell; a Lagrangian cell keeps its material for good."""
    centre_x, centre_y = x[:-1, :-1] + 0.5, y[:-1, :-1] + 0.5
    share = np.zeros_like(centre_x)
    for disc in discs:
        dx, dy = centre_x - disc.x, centre_y - disc.y
        share = np.maximum(share, np.clip(disc.radius - np.sqrt(dx * dx + dy * dy) + 0.5, 0.0, 1.0))
    return share


def _corners(nodes: Array) -> list[Array]:
    return [nodes[:-1, :-1], nodes[:-1, 1:], nodes[1:, 1:], nodes[1:, :-1]]


def _smallest_jacobian(x: Array, y: Array) -> Array:
    return minimum_jacobian(quads(_corners(x), _corners(y)))
