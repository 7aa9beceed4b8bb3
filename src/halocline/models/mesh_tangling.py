"""The mesh-tangling networks of Dryden et al. (2019), and a small one of the same kind for benchmarks.

All take 18 fields of a mesh, `[N, 18, size, size]`, and give for every cell the probability that it tangles,
`[N, 1, size, size]`. They are plain chains: convolutions, no pooling, no skips. The head predicts an r x r patch of
the mask at every position of the coarsest map and rearranges it to full resolution. Train with `nn.MSELoss`.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

FIELDS = 18


@dataclass(frozen=True)
class Block:
    """Convolutions of equal width; the first one has the block's stride."""

    channels: tuple[int, ...]
    stride: int


BLOCKS_1K = (
    Block((128, 256, 256, 256, 256), 2),
    Block((384,) * 5, 2),
    Block((512,) * 5, 2),
    Block((384,) * 5, 2),
    Block((384,) * 5, 2),
    Block((128,) * 5, 1),
)
BLOCKS_2K = tuple(Block((channels,) * 3, 2) for channels in (128, 256, 256, 384, 384, 128))


def mesh_tangling_1k(size: int = 1024, width: float = 1.0) -> nn.Sequential:
    """The network for 1024 x 1024 meshes: `[N, 18, size, size]` to `[N, 1, size, size]`, 30 convolutions and a head.

    `width` multiplies the number of channels. Raises `ValueError` if `size` is not a multiple of 32.
    """
    return _chain("mesh_tangling_1k", BLOCKS_1K, size, width, _relu_then_norm)


def mesh_tangling_2k(size: int = 2048, width: float = 1.0) -> nn.Sequential:
    """The network for 2048 x 2048 meshes: `[N, 18, size, size]` to `[N, 1, size, size]`, 18 convolutions and a head.

    `width` multiplies the number of channels. Raises `ValueError` if `size` is not a multiple of 64.
    """
    return _chain("mesh_tangling_2k", BLOCKS_2K, size, width, _relu_then_norm)


def mini_mesh(size: int = 1024, channels: Sequence[int] = (24, 48, 64), width: float = 1.0) -> nn.Sequential:
    """A benchmark net: 12 conv-BN-ReLU layers, 18 channels in, `[N, 18, size, size]` to `[N, 1, size, size]`.

    One block of four convolutions per entry of `channels`, the first of each with stride 2. At 1024 x 1024 a training
    step in fp32 takes some 1.4 s on one core of a 2025 server. Raises `ValueError` if `size` is not a multiple of
    `2 ** len(channels)`.
    """
    return _chain("mini_mesh", [Block((c,) * 4, 2) for c in channels], size, width, _norm_then_relu)


def scaled(channels: int, width: float) -> int:
    """`channels` times `width`, rounded, and at least 1."""
    return max(1, round(channels * width))


def check_size(model: str, size: int, stride: int) -> None:
    """Raise `ValueError` if `size` is not a positive multiple of `stride`, the total stride of `model`."""
    if size < stride or size % stride:
        below = size - size % stride
        instead = f"{below} or {below + stride}" if below > 0 else f"{stride}"
        raise ValueError(
            f"{model}: size {size} is not a positive multiple of {stride}, the model's total stride. Use {instead}."
        )


def _relu_then_norm(layer: str, channels: int) -> list[tuple[str, nn.Module]]:
    return [(f"relu{layer}", nn.ReLU()), (f"bn{layer}", nn.BatchNorm2d(channels, eps=1e-5, momentum=0.1))]


def _norm_then_relu(layer: str, channels: int) -> list[tuple[str, nn.Module]]:
    return [(f"bn{layer}", nn.BatchNorm2d(channels, eps=1e-5, momentum=0.1)), (f"relu{layer}", nn.ReLU())]


def _chain(
    model: str,
    blocks: Sequence[Block],
    size: int,
    width: float,
    after_conv: Callable[[str, int], list[tuple[str, nn.Module]]],
) -> nn.Sequential:
    total_stride = 1
    for block in blocks:
        total_stride *= block.stride
    check_size(model, size, total_stride)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    c_in = FIELDS
    for b, block in enumerate(blocks, start=1):
        for i, full in enumerate(block.channels, start=1):
            c_out = scaled(full, width)
            kernel = 5 if (b, i) == (1, 1) else 3
            stride = block.stride if i == 1 else 1
            layers[f"conv{b}_{i}"] = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False)
            layers.update(after_conv(f"{b}_{i}", c_out))
            c_in = c_out
    layers["head"] = nn.Conv2d(c_in, total_stride**2, 1, bias=False)
    layers["spread"] = nn.PixelShuffle(total_stride)
    layers["probability"] = nn.Sigmoid()
    return nn.Sequential(layers)
