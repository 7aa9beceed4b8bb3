"""The layers of random nets: each kind draws its arguments for the shape it is given, and makes a module of them."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]
Given = Mapping[str, Any]
CHANNELS = 8  # at most, where a layer may choose


@dataclass(frozen=True)
class Layer:
    """A kind of layer with its arguments. What follows from the shape of its input (channels in) is not among them."""

    kind: str
    given: Given = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """`draw` gives random arguments for an input of some shape, `make` the module for arguments and shape."""

    draw: Callable[[random.Random, Shape], dict[str, Any]]
    make: Callable[[Given, Shape], nn.Module]


class Applied(nn.Module):
    """A function without parameters as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Gate(nn.Module):
    """Squeeze and excitation: each channel is weighted by what a global mean says."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mix = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.sigmoid(self.mix(x.flatten(2).mean(2)))
        return x * weights.view(*weights.shape, *(1,) * (x.dim() - 2))


def of_dims(name: str, shape: Shape) -> Any:
    """The class in `torch.nn` for so many dims of space: `Conv` for a picture is `Conv2d`."""
    return getattr(nn, f"{name}{len(shape) - 2}d")


def each(shape: Shape, draw: Callable[[], int]) -> tuple[int, ...]:
    """One draw for each dim of space."""
    return tuple(draw() for _ in shape[2:])


def divisor(rng: random.Random, number: int) -> int:
    return rng.choice([d for d in range(1, number + 1) if number % d == 0])


def _draw_conv(rng: random.Random, shape: Shape) -> dict[str, Any]:
    groups = divisor(rng, shape[1]) if rng.random() < 0.3 else 1
    kernel, dilation = each(shape, lambda: rng.randint(1, 5)), each(shape, lambda: rng.choice((1, 1, 1, 2, 3)))
    stride = each(shape, lambda: rng.choice((1, 1, 2, 3)))
    padding: Any = tuple(rng.randint(0, d * (k - 1) // 2 + 1) for k, d in zip(kernel, dilation))
    if rng.random() < 0.2:
        padding, stride = "same", (1,) * len(stride)
    mode = rng.choice(("zeros", "zeros", "zeros", "reflect", "replicate", "circular"))
    out = groups * rng.randint(1, max(1, CHANNELS // groups))
    return {"out_channels": out, "kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation,
            "groups": groups, "padding_mode": mode, "bias": rng.random() < 0.7}  # fmt: skip


def _draw_transposed(rng: random.Random, shape: Shape) -> dict[str, Any]:
    groups = divisor(rng, shape[1]) if rng.random() < 0.3 else 1
    kernel, dilation = each(shape, lambda: rng.randint(1, 4)), each(shape, lambda: rng.choice((1, 1, 2)))
    stride = each(shape, lambda: rng.choice((1, 2, 2, 3)))
    return {"out_channels": groups * rng.randint(1, max(1, CHANNELS // groups)), "kernel_size": kernel,
            "stride": stride, "padding": tuple(rng.randint(0, d * (k - 1)) for k, d in zip(kernel, dilation)),
            "output_padding": tuple(rng.randrange(max(s, d)) for s, d in zip(stride, dilation)),
            "groups": groups, "dilation": dilation}  # fmt: skip


def _draw_norm(rng: random.Random, shape: Shape) -> dict[str, Any]:
    how = rng.choice(("batch", "batch", "batch", "instance", "group", "layer"))
    return {"how": how, "groups": divisor(rng, shape[1]), "affine": rng.random() < 0.8, "track": rng.random() < 0.8,
            "momentum": rng.choice((0.1, 0.3, None))}  # fmt: skip


def _make_norm(given: Given, shape: Shape) -> nn.Module:
    if given["how"] == "group":
        return nn.GroupNorm(given["groups"], shape[1], affine=given["affine"])
    if given["how"] == "layer":
        return nn.LayerNorm(shape[1:], elementwise_affine=given["affine"])
    name = "BatchNorm" if given["how"] == "batch" else "InstanceNorm"
    momentum = given["momentum"] if name == "BatchNorm" or given["momentum"] else 0.1
    made: nn.Module = of_dims(name, shape)(
        shape[1], momentum=momentum, affine=given["affine"], track_running_stats=given["track"]
    )
    return made


ACTIVATIONS = ("ReLU", "LeakyReLU", "SiLU", "GELU", "Tanh", "Sigmoid", "ELU", "Hardswish", "Softplus", "PReLU", "Mish")


def _draw_act(rng: random.Random, shape: Shape) -> dict[str, Any]:
    name = rng.choice(ACTIVATIONS)
    return {"name": name, "inplace": name in ("ReLU", "LeakyReLU", "SiLU", "ELU", "Hardswish") and rng.random() < 0.4}


def _make_act(given: Given, shape: Shape) -> nn.Module:
    made: nn.Module = getattr(nn, given["name"])(**({"inplace": True} if given["inplace"] else {}))
    return made


def _draw_pool(rng: random.Random, shape: Shape) -> dict[str, Any]:
    kernel = each(shape, lambda: rng.randint(1, 4))
    stride = tuple(rng.choice((1, k, rng.randint(1, 4))) for k in kernel)
    padding = tuple(rng.randint(0, k // 2) for k in kernel)
    return {"how": rng.choice(("Max", "Avg")), "kernel_size": kernel, "stride": stride, "padding": padding,
            "ceil_mode": rng.random() < 0.4}  # fmt: skip


def _make_pool(given: Given, shape: Shape) -> nn.Module:
    rest = {key: value for key, value in given.items() if key != "how"}
    made: nn.Module = of_dims(f"{given['how']}Pool", shape)(**rest)
    return made


def _draw_resize(rng: random.Random, shape: Shape) -> dict[str, Any]:
    linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(shape) - 2]
    mode = rng.choice(("nearest", "nearest-exact", "area", linear, linear, *(["bicubic"] if len(shape) == 4 else [])))
    corners = rng.choice((True, False)) if mode in (linear, "bicubic") else None
    if rng.random() < 0.5:
        return {"size": tuple(rng.randint(max(1, s // 2), 2 * s + 1) for s in shape[2:]), "mode": mode,
                "align_corners": corners}  # fmt: skip
    return {"scale_factor": rng.choice((2.0, 2.0, 1.5, 0.5, 0.7)), "mode": mode, "align_corners": corners}


def _draw_pad(rng: random.Random, shape: Shape) -> dict[str, Any]:
    mode = rng.choice(("constant", "constant", "reflect", "replicate", "circular"))
    low = -2 if mode == "constant" else 0
    widths = tuple(rng.randint(low, min(3, size - 1)) for size in reversed(shape[2:]) for _ in "ab")
    return {"pad": widths, "mode": mode, **({"value": rng.choice((0.0, 1.5))} if mode == "constant" else {})}


def _draw_crop(rng: random.Random, shape: Shape) -> dict[str, Any]:
    return {"starts": each(shape, lambda: rng.randint(0, 2)), "stops": each(shape, lambda: rng.choice((-1, -2, 1000))),
            "steps": each(shape, lambda: rng.choice((1, 1, 1, 2)))}  # fmt: skip


def _make_crop(given: Given, shape: Shape) -> nn.Module:
    cuts = tuple(slice(*cut) for cut in zip(given["starts"], given["stops"], given["steps"]))
    return Applied(lambda x: x[(slice(None), slice(None), *cuts)])


def _draw_move(rng: random.Random, shape: Shape) -> dict[str, Any]:
    return {
        "how": rng.choice(("flip", "roll", "swap")),
        "dim": rng.randint(2, len(shape) - 1),
        "by": rng.randint(-3, 3),
    }


def _make_move(given: Given, shape: Shape) -> nn.Module:
    dim, by = given["dim"], given["by"]
    moves: dict[str, Callable[[Tensor], Tensor]] = {
        "flip": lambda x: x.flip(dim),
        "roll": lambda x: x.roll(by, dim),
        "swap": lambda x: x.transpose(dim, -1),
    }
    return Applied(moves[given["how"]])


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "centre": lambda x: x - x.mean(tuple(range(2, x.dim())), keepdim=True),
    "softmax": lambda x: x * x.softmax(1),
    "softmax of space": lambda x: x * x.softmax(-1),
    "halves": lambda x: torch.cat([x, x], 1).chunk(2, 1)[0] * torch.sigmoid(x),
    "unit": lambda x: F.normalize(x + 0.1, dim=1),
    "largest": lambda x: x - x.amax((1, 2), keepdim=True),
    "sum of rows": lambda x: x + 0.1 * x.cumsum(2),
}

KINDS: dict[str, Kind] = {
    "conv": Kind(_draw_conv, lambda given, shape: of_dims("Conv", shape)(shape[1], **given)),
    "transposed": Kind(_draw_transposed, lambda given, shape: of_dims("ConvTranspose", shape)(shape[1], **given)),
    "norm": Kind(_draw_norm, _make_norm),
    "act": Kind(_draw_act, _make_act),
    "pool": Kind(_draw_pool, _make_pool),
    "adaptive": Kind(
        lambda rng, shape: {"how": rng.choice(("Avg", "Max")), "size": each(shape, lambda: rng.randint(1, 7))},
        lambda given, shape: of_dims(f"Adaptive{given['how']}Pool", shape)(given["size"]),
    ),
    "resize": Kind(_draw_resize, lambda given, shape: Applied(lambda x: F.interpolate(x, **given))),
    "pad": Kind(_draw_pad, lambda given, shape: Applied(lambda x: F.pad(x, **given))),
    "crop": Kind(_draw_crop, _make_crop),
    "move": Kind(_draw_move, _make_move),
    "shuffle": Kind(
        lambda rng, shape: {"down": rng.random() < 0.5, "factor": rng.choice((2, 2, 3))},
        lambda given, shape: (nn.PixelUnshuffle if given["down"] else nn.PixelShuffle)(given["factor"]),
    ),
    "gate": Kind(lambda rng, shape: {}, lambda given, shape: Gate(shape[1])),
    "mix": Kind(
        lambda rng, shape: {"how": rng.choice(list(MIXES))}, lambda given, shape: Applied(MIXES[given["how"]])
    ),
    "dropout": Kind(
        lambda rng, shape: {"p": rng.choice((0.0, 0.2, 0.5)), "of": rng.choice(("elements", "channels"))},
        lambda given, shape: (nn.Dropout if given["of"] == "elements" else of_dims("Dropout", shape))(given["p"]),
    ),
}  # fmt: skip
