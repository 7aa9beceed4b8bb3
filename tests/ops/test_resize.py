"""Resizing: positions are ATen's to the last bit; parts are those of the whole."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from halocline.errors import PlanError
from halocline.ops import rule_for
from halocline.ops.resample import Resampling

from .fixed_split import check_split, node_for, reads

aten = torch.ops.aten
REAL = {torch.float32: np.float32, torch.float64: np.float64}


def image(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def sizes(number: int) -> list[tuple[int, int, float | None]]:
    """Input size, output size and scale; the first ones are decided by rounding."""
    rng = random.Random(5)
    found: list[tuple[int, int, float | None]] = [(70, 3815, None), (1333, 258, None), (34, 34, 1.01), (5, 10, 2.1)]
    while len(found) < number:
        size, scale = rng.randint(10, 3000), rng.choice((rng.uniform(0.1, 4), 1.7, 3.0, 1 / 3, 0.5, None))
        found.append((size, int(size * scale) if scale else rng.randint(1, 4000), scale))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_inputs_are_those_of_torch(mode: str, dtype: torch.dtype) -> None:
    op = {"nearest": aten.upsample_nearest2d, "nearest-exact": aten._upsample_nearest_exact2d}[mode]
    for size, count, scale in sizes(60):
        ramp = torch.arange(size, dtype=dtype).expand(1, 4, 2, size)
        resampling = Resampling(mode, size, count, scale, False, REAL[dtype])  # type: ignore[arg-type]
        for kernel, format in (("contiguous", torch.contiguous_format), ("channels_last", torch.channels_last)):
            found = op(ramp.contiguous(memory_format=format), [129, count], None, scale)[0, 0, 0]
            index = resampling.by(kernel).taps((0, count))[0]  # type: ignore[arg-type]
            assert np.array_equal(index[:, 0], found.numpy()), (size, count, scale, kernel)


@pytest.mark.parametrize("align_corners", [False, True])
def test_linear_weights_are_those_of_torch(align_corners: bool) -> None:
    for size, count, scale in sizes(60):
        odd = (torch.arange(size) % 2).float().view(1, 1, size)
        found = aten.upsample_linear1d(odd, [count], align_corners, scale)[0, 0]
        index, weights = Resampling("linear", size, count, scale, align_corners, np.float32).taps((0, count))
        taken = np.ones(index.shape, np.float32) if weights is None else weights
        expected = np.where(index % 2, taken, 0).sum(1, dtype=np.float32)
        assert np.array_equal(expected, found.numpy()), (size, count, scale)


@pytest.mark.parametrize("split", [{"h": 2, "w": 2}, {"h": 5}, {"n": 2, "c": 2}])
@pytest.mark.parametrize("scale", [2.0, 4.0, 3.0, 1.7, 0.5])
@pytest.mark.parametrize(
    ("op", "more"),
    [("upsample_nearest2d", []), ("_upsample_nearest_exact2d", []), ("upsample_bilinear2d", [False]),
     ("upsample_bilinear2d", [True]), ("upsample_bicubic2d", [False]), ("upsample_bicubic2d", [True])],
)  # fmt: skip
def test_images(op: str, more: list[bool], scale: float, split: dict[str, int]) -> None:
    check_split(getattr(aten, op).vec, image(2, 2, 7, 6), None, *more, [scale, scale], split=split)


def test_volumes_and_lines() -> None:
    check_split(aten.upsample_trilinear3d.vec, image(1, 2, 3, 4, 5), [7, 4, 9], False, None, split={"d": 2, "w": 3})
    check_split(aten.upsample_trilinear3d.vec, image(1, 2, 3, 4, 5), None, False, [2.0] * 3, split={"d": 3, "h": 2})
    check_split(aten.upsample_nearest3d.vec, image(1, 2, 3, 4, 5), None, [2.0, 1.0, 2.0], split={"d": 2, "w": 3})
    check_split(aten.upsample_linear1d.vec, image(1, 2, 5), [13], True, None, split={"w": 6})


def test_one_row_grows_to_many() -> None:
    check_split(aten.upsample_bilinear2d.vec, image(1, 2, 1, 1), [21, 19], False, None, split={"h": 3, "w": 2})


def test_scale_of_the_user_counts_not_the_ratio_of_sizes() -> None:
    check_split(aten.upsample_bilinear2d.vec, image(1, 1, 7, 7), None, False, [1.9, 2.1], split={"h": 2})
    check_split(aten.upsample_nearest2d.default, image(1, 2, 7, 7), [14, 14], 2.2, None, split={"h": 2})


def test_channels_last() -> None:
    x = image(2, 3, 7, 6).contiguous(memory_format=torch.channels_last)
    check_split(aten.upsample_bilinear2d.vec, x, None, False, [1.7, 2.0], split={"h": 2})


def test_doubling_reads_one_halo_row_for_linear_and_none_for_nearest() -> None:
    node, _ = node_for(aten.upsample_bilinear2d.vec, image(1, 1, 8, 8), None, False, [2.0, 2.0])
    assert reads(node, h=(4, 8))[0].intervals[2] == (1, 5)
    node, _ = node_for(aten.upsample_nearest2d.vec, image(1, 1, 8, 8), None, [2.0, 2.0])
    assert reads(node, h=(4, 8))[0].intervals[2] == (2, 4)


def test_integers_are_taken_as_they_are_or_refused() -> None:
    x = torch.randint(0, 255, (1, 2, 6, 6), dtype=torch.uint8)
    check_split(aten.upsample_nearest2d.vec, x, None, [1.5, 2.0], split={"h": 2})
    node, _ = node_for(aten.upsample_bilinear2d.vec, x, None, False, [2.0, 2.0])
    with pytest.raises(PlanError, match="convert to float"):
        rule_for(node).signature(node)
