"""Batch norm applies the ReLU after it, block by block, in both directions: the values stay those of plain torch."""

import copy

import pytest
import torch
from torch import Tensor, nn

import halocline as hc
from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.ops import blocks
from halocline.verify import verify


class Net(nn.Module):
    """Three batch norms before a ReLU; the output of the last is also read as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.conv2, self.bn2 = nn.Conv2d(5, 4, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(4, affine=False)
        self.conv3, self.bn3 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.bn2.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        y = self.bn3(self.conv3(x))
        return torch.relu(y) * y.tanh()


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


torch.manual_seed(0)
NET = Net().double()
BATCH = torch.randn(2, 3, 13, 10, dtype=torch.float64), torch.randn(2, 4, 7, 5, dtype=torch.float64)


def net() -> nn.Module:
    return copy.deepcopy(NET)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("block_bytes", [64, 1 << 21])
@pytest.mark.parametrize("plan", ["h=3", "n=2", "w=2"])
def test_values_are_those_of_one_process(
    plan: str, block_bytes: int, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    ranks = int(plan[-1])
    for memory_format in ("channels_last", "preserve"):

        def rank(comm: Comm, memory_format: str = memory_format) -> bool:
            step = hc.parallelize(net(), squared, BATCH, plan, memory_format=memory_format, comm=comm)
            manners = [manner.then for manner in step.program.manners.values() if manner.then]
            assert manners == ["relu", "relu"]  # what is read twice is left as it is
            return verify(net().train(training), squared, BATCH, plan, comm=comm).passed

        assert all(run_threads(ranks, rank))


def test_recomputed_values_are_too() -> None:
    def rank(comm: Comm) -> list[Tensor]:
        model = net()
        step = hc.parallelize(model, squared, BATCH, "h=2", comm=comm, recompute=["conv1", "bn1", "conv2"])
        step(*step.scatter(*BATCH)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = net()
    squared(plain(BATCH[0]), BATCH[1]).backward()
    wanted = [p.grad for p in plain.parameters() if p.grad is not None]
    for grad, want in zip(run_threads(2, rank)[0], wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-9, atol=1e-9)
