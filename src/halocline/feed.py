"""Feeds: batches of which each rank makes only the regions it owns."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from .data.mesh_tangling import CHANNELS, MeshTangling
from .errors import HaloclineError
from .models.zoo import Entry
from .region import Region

Batch = tuple[Tensor, ...]

MESHES = ("mesh-tangling-1k", "mesh-tangling-2k", "mini-mesh")
KEPT_BYTES = 1 << 30  # of made data on each rank: an epoch at the sizes of a laptop, a few samples at full size
EPOCH = 32  # batches after which a model's own data repeat


class Feed(Protocol):
    """Batches by number, the same on every rank; after an epoch they repeat."""

    def like(self) -> Batch:
        """Tensors of a whole batch's shapes and dtypes, whose values mean nothing."""

    def part(self, number: int, regions: Sequence[Region]) -> Batch:
        """Batch `number`, of each tensor the given region."""

    def whole(self, number: int) -> Batch:
        """Batch `number`, whole."""


def feed_of(entry: Entry, size: int, batch: int, samples: int, dtype: torch.dtype, seed: int) -> Feed:
    """The feed of a zoo entry: batches of `batch` samples that are `size` wide, floating-point ones in `dtype`.

    `samples` is how many different meshes there are; other models repeat theirs after `EPOCH` batches. A model from a
    file always gets the one batch that its factory gives. Raises HaloclineError if it gives none.
    """
    if entry.name in MESHES:
        return MeshFeed(size, batch, samples, dtype, seed)
    if entry.batch is None:
        raise HaloclineError(
            f"{entry.name}: there is no data to train with; its factory returns a model only. "
            "Let it return (model, loss, batch)."
        )
    return EntryFeed(entry, size, batch, dtype, seed)


class MeshFeed:
    """Batches `(x[batch, 18, size, size], y[batch, 1, size, size])` of mesh-tangling samples, made region by region."""

    def __init__(self, size: int, batch: int, samples: int, dtype: torch.dtype, seed: int) -> None:
        self.data = MeshTangling(size, samples, seed)
        self.size, self.batch, self.dtype = size, batch, dtype
        self._kept = _Kept()

    def like(self) -> Batch:
        square = (self.size, self.size)
        return (
            torch.empty(self.batch, len(CHANNELS), *square, dtype=self.dtype),
            torch.empty(self.batch, 1, *square, dtype=self.dtype),
        )

    def part(self, number: int, regions: Sequence[Region]) -> Batch:
        return tuple(self._part(number, tensor, region) for tensor, region in enumerate(regions))

    def whole(self, number: int) -> Batch:
        return self.part(number, [Region.whole(x.shape) for x in self.like()])

    def _part(self, number: int, tensor: int, region: Region) -> Tensor:
        part = torch.empty(region.shape, dtype=self.dtype)
        (n0, n1), (c0, c1), rows, cols = region.intervals
        for k in range(n0, n1):
            item = (number * self.batch + k) % len(self.data)
            sample = self._kept.get((item, rows, cols), partial(self.data.sample, item, rows, cols))
            part[k - n0] = sample[tensor][c0:c1]
        return part


class EntryFeed:
    """Batches that a zoo entry makes whole; a rank cuts its regions out."""

    def __init__(self, entry: Entry, size: int, batch: int, dtype: torch.dtype, seed: int) -> None:
        assert entry.batch is not None
        self._make, self.size, self.batch, self.dtype, self.seed = entry.batch, size, batch, dtype, seed
        self._kept = _Kept()

    def like(self) -> Batch:
        return self.whole(0)

    def part(self, number: int, regions: Sequence[Region]) -> Batch:
        return tuple(
            x[region.within(Region.whole(x.shape))] for x, region in zip(self.whole(number), regions, strict=True)
        )

    def whole(self, number: int) -> Batch:
        number %= EPOCH
        return self._kept.get(number, lambda: self._cast(self._make(self.size, self.batch, self.seed + number)))

    def _cast(self, batch: Sequence[Tensor]) -> Batch:
        return tuple(x.to(self.dtype) if x.is_floating_point() else x for x in batch)


class _Kept:
    """What has been made, as long as it fits. Batches come in turn: to drop the oldest would be to drop the next."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Batch] = {}
        self._free = KEPT_BYTES

    def get(self, key: Hashable, make: Callable[[], Batch]) -> Batch:
        if key in self._kept:
            return self._kept[key]
        made = make()
        nbytes = sum(x.nbytes for x in made)
        if nbytes <= self._free:
            self._kept[key] = made
            self._free -= nbytes
        return made
