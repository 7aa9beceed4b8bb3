"""Small real networks for the tests, each with its loss and a whole batch, in fp64 and equal in every process."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halocline.models.mesh_tangling import mesh_tangling_1k, mesh_tangling_2k
from halocline.models.resnet import resnet50, resnet_small
from halocline.models.unet import unet2d, unet3d

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Net:
    build: Callable[[], nn.Module]
    loss: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    plans: tuple[str, ...] = ("sample", "spatial")

    def make(self) -> tuple[nn.Module, nn.Module, Batch]:
        torch.manual_seed(1)
        model, loss = self.build().double(), self.loss().double()
        return model, loss, tuple(x.double() if x.is_floating_point() else x for x in self.batch())


def pictures(n: int, channels: int, *size: int, classes: int = 10) -> Callable[[], Batch]:
    return lambda: (torch.randn(n, channels, *size), torch.randint(classes, (n,)))


def maps(n: int, channels: int, *size: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(n, channels, *size), (torch.rand(n, 1, *size) < 0.3).float())


class OddUNet(nn.Module):
    """Odd sizes at every level: strided convolutions down, nearest interpolation to the skip's size up."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 4, 6, 8)
        self.downs = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in zip(widths, widths[1:]))
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in widths[1:])
        self.ups = nn.ModuleList(nn.Conv2d(a + b, a, 3, padding=1) for a, b in zip(widths, widths[1:]))
        self.head = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down, norm in zip(self.downs, self.norms):
            skips.append(x)
            x = F.relu(norm(down(x)), inplace=True)
        for up, skip in zip(reversed(self.ups), reversed(skips)):
            x = F.relu(up(torch.cat([F.interpolate(x, size=skip.shape[2:]), skip], 1)))
        return self.head(x)


class Tied(nn.Module):
    """One convolution used twice, a frozen one, an unused one, and a squeeze-and-excitation gate."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Conv2d(3, 3, 3, padding=1)
        self.frozen = nn.Conv2d(3, 3, 3, padding=1).requires_grad_(False)
        self.unused = nn.Conv2d(3, 3, 1)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 3, 1), nn.Sigmoid())
        self.head = nn.Linear(3, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.shared(x))
        x = x + torch.relu(self.frozen(self.shared(x)))
        x = x * self.gate(x)
        return self.head(x.mean((2, 3)))


NETS: dict[str, Net] = {
    "mesh-1k": Net(lambda: mesh_tangling_1k(64, 0.03), nn.MSELoss, maps(2, 18, 64, 64), ("sample", "spatial", "hw")),
    "mesh-2k": Net(lambda: mesh_tangling_2k(128, 0.03), nn.MSELoss, maps(1, 18, 128, 128), ("spatial",)),
    # The 1K net in small amplifies any rounding a millionfold in five steps, one process too; the 2K net does not.
    "mesh-2k-batch": Net(lambda: mesh_tangling_2k(128, 0.05), nn.MSELoss, maps(4, 18, 128, 128), ()),
    "resnet-small": Net(lambda: resnet_small(3), nn.CrossEntropyLoss, pictures(4, 3, 33, 29),
                        ("sample", "spatial", "hw")),
    "resnet50": Net(lambda: resnet50(), nn.CrossEntropyLoss, pictures(2, 3, 64, 64), ("spatial",)),
    "unet2d": Net(lambda: unet2d(32, features=(3, 4, 6)), nn.BCEWithLogitsLoss, maps(2, 1, 36, 28), ("spatial", "hw")),
    "unet3d": Net(lambda: unet3d(16, features=(2, 3, 4)), nn.BCEWithLogitsLoss, maps(1, 1, 16, 12, 8),
                  ("spatial", "dh")),
    "odd-unet": Net(OddUNet, nn.CrossEntropyLoss, lambda: (torch.randn(1, 3, 37, 45), torch.randint(4, (1, 37, 45))),
                    ("spatial", "hw")),
    "tied": Net(Tied, nn.CrossEntropyLoss, pictures(4, 3, 11, 9), ("sample", "spatial", "mixed")),
}  # fmt: skip


def phrase(plan: str, ranks: int) -> str:
    """The plan for so many ranks: `hw` and `mixed` are grids as even as the number allows."""
    small = max(d for d in range(1, ranks + 1) if ranks % d == 0 and d * d <= ranks)
    return {
        "dh": f"d={ranks // small},h={small}",
        "hw": f"h={ranks // small},w={small}",
        "mixed": f"n={small},h={ranks // small}",
    }.get(plan, plan)
