"""Captured graphs that the planner's tests share; captured once, on fake tensors, at any size."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from halocline.capture import capture
from halocline.graph import Graph
from halocline.models.zoo import ZOO


def captured(build: Callable[[], nn.Module], x: tuple[int, ...], loss: nn.Module | None = None) -> Graph:
    """The graph of a model on a batch of shape `x`, with the sum of squares as the loss if there is none."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, batch = build(), torch.empty(x)
        target = torch.empty(model(batch).shape)
    return capture(model, loss or nn.MSELoss(), (batch, target))[0]


@lru_cache(maxsize=32)
def zoo(name: str, size: int, n: int, width: float = 1.0) -> Graph:
    """A net of the zoo at global shapes."""
    entry = ZOO[name]
    assert entry.loss is not None
    channels = {"resnet50": 3, "unet3d": 1, "unet2d": 1}.get(name, 18)
    dims = 3 if name == "unet3d" else 2
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, x = entry.build(size, width), torch.empty(n, channels, *(size,) * dims)
        y = torch.empty(n, dtype=torch.int64) if name.startswith("resnet") else torch.empty(n, 1, *(size,) * dims)
    return capture(model, entry.loss(), (x, y))[0]


class Residual(nn.Module):
    """A stem, a strided branch and a strided shortcut, added."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 8, 3, padding=1)
        self.branch = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.shortcut = nn.Conv2d(8, 16, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return torch.relu(self.branch(x) + self.shortcut(x))


class Dense(nn.Module):
    """Every layer reads all before it, as in DenseNet."""

    def __init__(self, layers: int = 4, growth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4 + growth * i, growth, 3, padding=1) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer in self.layers:
            values.append(torch.relu(layer(torch.cat(values, 1))))
        return torch.cat(values, 1)


class Inception(nn.Module):
    """Four parallel branches of different depth, concatenated, twice."""

    def __init__(self) -> None:
        super().__init__()

        def conv(c_in: int, c_out: int, kernel: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(c_in, c_out, kernel, padding=kernel // 2), nn.ReLU())

        def block(c_in: int) -> nn.ModuleList:
            return nn.ModuleList(
                [
                    conv(c_in, 8, 1),
                    nn.Sequential(conv(c_in, 8, 1), conv(8, 8, 3)),
                    nn.Sequential(conv(c_in, 8, 1), conv(8, 8, 3), conv(8, 8, 3)),
                    nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(c_in, 8, 1)),
                ]
            )

        self.blocks = nn.ModuleList([block(4), block(32)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.cat([branch(x) for branch in block], 1)  # type: ignore[union-attr]
        return x
