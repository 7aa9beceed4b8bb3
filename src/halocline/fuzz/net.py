"""Random nets: a list of layers with skips, drawn for a shape of input."""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import KINDS, Layer, Shape

# How often a kind is drawn; `save` remembers a value, `add` and `cat` bring the last one back.
WEIGHTS = {
    "conv": 8, "transposed": 2, "norm": 4, "act": 4, "pool": 2, "adaptive": 0.5, "resize": 2, "pad": 1, "crop": 1,
    "move": 1, "shuffle": 0.5, "gate": 0.7, "mix": 1, "dropout": 1, "save": 3, "add": 2, "cat": 2,
}  # fmt: skip
LARGEST = {1: 60, 2: 40, 3: 16}  # no dim of space gets larger, by the number of dims
WIDEST = 24  # nor are there more channels
HEADS = ("none", "none", "pooled", "flat")


@dataclass(frozen=True)
class Recipe:
    """A net: the shape of its input, its layers, and what comes last."""

    shape: Shape
    layers: tuple[Layer, ...]
    head: str = "none"


class Merge(nn.Module):
    """Brings a skip to the size of the main path, and adds or concatenates it."""

    def __init__(self, how: str, skip: Shape, shape: Shape) -> None:
        super().__init__()
        self.how = how
        conv = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[len(shape)]
        self.match = conv(skip[1], shape[1], 1) if how == "add" and skip[1] != shape[1] else nn.Identity()

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        if skip.shape[2:] != x.shape[2:]:
            skip = F.interpolate(skip, size=x.shape[2:], mode="nearest")
        return x + self.match(skip) if self.how == "add" else torch.cat([x, skip], 1)


class Head(nn.Module):
    """From a map to a few numbers a sample."""

    def __init__(self, how: str, shape: Shape) -> None:
        super().__init__()
        self.how = how
        self.last = nn.Linear(shape[1] if how == "pooled" else torch.Size(shape[1:]).numel(), 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(x.flatten(2).mean(2) if self.how == "pooled" else x.flatten(1))
        return made


class RandomNet(nn.Module):
    """The net of a recipe. Raises what torch raises where a layer does not fit the shape it gets."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.kinds = tuple(layer.kind for layer in recipe.layers)
        self.layers = nn.ModuleList()
        skips, shape = [recipe.shape], recipe.shape
        for layer in recipe.layers:
            self.layers.append(made(layer, shape, skips))
            shape = shape_after(layer, shape, skips)
        self.head = Head(recipe.head, shape) if recipe.head != "none" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        skips = [x]
        for kind, layer in zip(self.kinds, self.layers):
            if kind == "save":
                skips.append(x)
            elif kind in ("add", "cat"):
                x = layer(x, skips.pop() if len(skips) > 1 else skips[0])
            else:
                x = layer(x)
        result: Tensor = self.head(x)
        return result


def made(layer: Layer, shape: Shape, skips: list[Shape]) -> nn.Module:
    """The module of a layer for an input of `shape` and the shapes of what has been saved."""
    if layer.kind == "save":
        return nn.Identity()
    if layer.kind in ("add", "cat"):
        return Merge(layer.kind, skips[-1], shape)
    return KINDS[layer.kind].make(layer.given, shape)


def shape_after(layer: Layer, shape: Shape, skips: list[Shape]) -> Shape:
    """The shape that a layer makes; `skips` changes as in the net. Raises what torch raises if it does not fit."""
    if layer.kind == "save":
        skips.append(shape)
        return shape
    with torch.device("meta"):
        module = made(layer, shape, skips)
        inputs = [torch.empty(shape)]
        if layer.kind in ("add", "cat"):
            inputs.append(torch.empty(skips.pop() if len(skips) > 1 else skips[0]))
        return tuple(module(*inputs).shape)


def draw_recipe(rng: random.Random) -> Recipe:
    """A random net for a random odd shape."""
    dims = rng.choice((1, 2, 2, 2, 2, 3))
    sizes = [rng.randint(1 if rng.random() < 0.1 else 3, LARGEST[dims] // 2) for _ in range(dims)]
    shape: Shape = (rng.choice((1, 1, 2, 2, 3, 4, 5)), rng.randint(1, 6), *sizes)
    layers: list[Layer] = []
    after, skips = shape, [shape]
    wanted = rng.randint(2, 12)
    for _ in range(10 * wanted):
        if len(layers) == wanted:
            break
        (kind,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        try:
            layer = Layer(kind, KINDS[kind].draw(rng, after) if kind in KINDS else {})
            tried = list(skips)
            made_shape = shape_after(layer, after, tried)
        except (RuntimeError, ValueError, IndexError, NotImplementedError, AssertionError):
            continue  # it does not fit here
        if min(made_shape) < 1 or max(made_shape[2:]) > LARGEST[dims] or made_shape[1] > WIDEST:
            continue
        layers.append(layer)
        after, skips = made_shape, tried
    return Recipe(shape, tuple(layers), rng.choice(HEADS))
