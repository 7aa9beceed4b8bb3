"""A small net with batch norm, its batches, and ranks as threads that run a step of it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.step import Step, parallelize

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def batch_of(samples: int, rows: int = 9, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, rows, 7, dtype=torch.float64, generator=generator)
    return x, torch.randint(5, (samples,), generator=generator)


class Net(nn.Module):
    """Convolution, batch norm and a head; one of its parameters is used by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def on_ranks(
    ranks: int, model: nn.Module, act: Callable[[Step], Any], plan: Any = "spatial", loss: Any = None, **options: Any
) -> list[Any]:
    """What `act(step)` gives on each rank, for a step of a copy of `model` and of `loss`."""

    def rank(comm: Comm) -> Any:
        mine, measure = copy.deepcopy(model), copy.deepcopy(loss or nn.CrossEntropyLoss())
        return act(parallelize(mine, measure, plan=plan, comm=comm, **options))

    return run_threads(ranks, rank)


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_grads(got: dict[str, Tensor | None], model: nn.Module) -> None:
    """Where the plain model has no gradient, the split one has none either."""
    for name, want in grads_of(model).items():
        assert (got[name] is None) == (want is None), name
        torch.testing.assert_close(got[name], want, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
