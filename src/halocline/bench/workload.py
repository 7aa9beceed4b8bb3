"""What is measured: a net of the zoo, or one convolution."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halocline.models.zoo import load

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Layer:
    """One convolution: `channels` x `size`^2 to `filters`, as in the micro-benchmarks of Dryden et al. (2019)."""

    name: str
    channels: int
    size: int
    filters: int
    kernel: int
    padding: int
    stride: int


# Dryden et al. (2019) measure these; the first is a small layer, where what is beside the arithmetic shows.
LAYERS = {
    layer.name: layer
    for layer in (
        Layer("small", 16, 64, 16, 3, 1, 1),
        Layer("resnet50-conv1", 3, 224, 64, 7, 3, 2),
        Layer("resnet50-res3b_branch2a", 512, 28, 128, 1, 0, 1),
        Layer("mesh2k-conv1_1", 18, 2048, 128, 5, 2, 2),
        Layer("mesh2k-conv6_1", 384, 64, 128, 3, 1, 2),
    )
}


def sum_of(output: Tensor) -> Tensor:
    """A loss whose own cost hardly shows."""
    return output.sum()


@dataclass(frozen=True)
class Workload:
    """A net of the zoo (`name`), or a layer (`layer:NAME`), with the samples of a batch."""

    name: str
    size: int | None = None
    width: float = 1.0
    batch: int = 1

    @property
    def wants_input_gradient(self) -> bool:
        """A layer is measured as one in the middle of a net."""
        return self.name.startswith("layer:")

    def make(self) -> tuple[nn.Module, Callable[..., Tensor], Batch]:
        """The model, the loss and a whole batch, in fp32 and the same in every process."""
        torch.manual_seed(0)
        if self.name.startswith("layer:"):
            layer = LAYERS[self.name.removeprefix("layer:")]
            size = self.size or layer.size
            conv = nn.Conv2d(layer.channels, layer.filters, layer.kernel, layer.stride, layer.padding, bias=False)
            x = torch.randn(self.batch, layer.channels, size, size)
            return conv, lambda output, _: sum_of(output), (x, torch.zeros(1))
        entry = load(self.name)
        model = entry.build(self.size or entry.size or 0, self.width)
        assert entry.loss is not None and entry.batch is not None, f"{self.name} has no loss or no data"
        return model, entry.loss(), entry.batch(self.size or entry.size or 0, self.batch, 0)

    def __str__(self) -> str:
        size = f" {self.size}" if self.size else ""
        return f"{self.name}{size}" + (f" width {self.width:g}" if self.width != 1 else "") + f" batch {self.batch}"


def as_dict(workload: Workload) -> dict[str, Any]:
    return dict(workload.__dict__)
