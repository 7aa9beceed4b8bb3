"""Batch norm over groups of ranks, and dropout: what depends on the split on purpose, or must not."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.region import Region, balanced
from halocline.step import Step, parallelize
from halocline.verify import Report, verify
from tests.small_net import CLOSE, Net, assert_same_grads, batch_of, grads_of, on_ranks


class ByGroups(Net):
    """The plain net, but batch norm takes its moments in every block of samples and rows by itself.

    Running statistics move towards the mean of the groups' statistics, weighted by how many values they are of.
    """

    def __init__(self, net: Net, groups: list[tuple[slice, slice]]) -> None:
        super().__init__()
        self.double().load_state_dict(net.state_dict())
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        y, norm = torch.empty_like(x), self.norm
        counted = torch.zeros(3, 4, dtype=x.dtype)
        for samples, rows in self.groups:
            block = x[samples, :, rows]
            y[samples, :, rows] = F.batch_norm(block, None, None, norm.weight, norm.bias, True, eps=norm.eps)
            values = block.detach().transpose(0, 1).flatten(1)
            count = torch.full((4,), float(values.shape[1]), dtype=x.dtype)
            counted += torch.stack([count, count * values.mean(1), count * values.var(1)])
        with torch.no_grad():
            norm.running_mean.lerp_(counted[1] / counted[0], 0.1)
            norm.running_var.lerp_(counted[2] / counted[0], 0.1)
            norm.num_batches_tracked.add_(1)
        return self.head(torch.relu(y).mean((2, 3)))


EVERYTHING = [slice(None)]


def cut(size: int, parts: int) -> list[slice]:
    return [slice(*interval) for interval in balanced(size, parts)]


@pytest.mark.parametrize(
    ("statistics", "plan", "samples", "rows"),
    [
        ("global", "n=2,h=2", EVERYTHING, EVERYTHING),
        ("spatial", "spatial", EVERYTHING, EVERYTHING),
        ("spatial", "n=2,h=2", cut(5, 2), EVERYTHING),
        ("spatial", "sample", cut(5, 4), EVERYTHING),
        ("local", "n=2,h=2", cut(5, 2), cut(9, 2)),
        ("local", "spatial", EVERYTHING, cut(9, 4)),
    ],
)
def test_batch_norm_statistics(net: Net, statistics: str, plan: str, samples: list[slice], rows: list[slice]) -> None:
    batch = batch_of(5)

    def act(step: Step) -> tuple[list[float], dict[str, Tensor | None], dict[str, Tensor]]:
        losses = []
        for _ in range(2):
            loss = step(*step.scatter(*batch))
            loss.backward()
            losses.append(loss.item())
        return losses, grads_of(step.model), dict(step.named_buffers())

    found = on_ranks(4, net, act, plan, statistics=statistics)
    plain = ByGroups(net, [(n, h) for n in samples for h in rows])
    expected = []
    for _ in range(2):
        loss = F.cross_entropy(plain(batch[0]), batch[1])
        loss.backward()
        expected.append(loss.item())
    for losses, grads, buffers in found:
        assert losses == pytest.approx(expected, rel=1e-9)
        assert_same_grads(grads, plain)
        for name, value in plain.named_buffers():
            torch.testing.assert_close(buffers[name], value, **CLOSE)
            assert torch.equal(buffers[name], found[0][2][name]), f"{name} is not the same on all ranks"


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.maps = nn.Dropout2d(0.4)
        self.values = nn.Dropout(0.3)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maps(self.values(torch.relu(self.conv(x))))
        return self.head(self.values(x.mean((2, 3))))


@pytest.mark.parametrize("plan", ["sample", "spatial", "n=2,h=2"])
def test_dropout_equals_one_process_that_draws_the_same(plan: str) -> None:
    torch.manual_seed(0)
    model = Dropping().double()

    def rank(comm: Comm) -> Report:
        return verify(copy.deepcopy(model), nn.CrossEntropyLoss(), batch_of(4), plan, comm=comm, seed=3)

    for report in run_threads(4, rank):
        assert report.passed, str(report)


def test_dropout_masks_differ_between_parts_and_steps_and_can_be_replayed() -> None:
    x = torch.ones(2, 4, 64, 16)

    def masks(plan: Any, seed: int, steps: int) -> list[tuple[Region, list[Tensor]]]:
        def rank(comm: Comm) -> tuple[Region, list[Tensor]]:
            step = parallelize(nn.Dropout(0.5), batch=(x,), plan=plan, comm=comm, seed=seed)
            return step.regions[0], [step(*step.scatter(x)) != 0 for _ in range(steps)]

        return run_threads(4, rank)

    parts = masks("spatial", 0, 2)
    drawn = [mask for _, steps in parts for mask in steps]
    for number, mask in enumerate(drawn):
        kept = mask.double().mean()
        assert abs(kept - 0.5) < 4 * 0.5 / mask.numel() ** 0.5
        assert not any(torch.equal(mask, other) for other in drawn[:number])
    again, other = masks("spatial", 0, 2), masks("spatial", 1, 1)
    assert all(torch.equal(a, b) for (_, one), (_, two) in zip(parts, again) for a, b in zip(one, two))
    assert not torch.equal(parts[0][1][0], other[0][1][0])
    replicas = masks("whole", 0, 1)
    assert all(torch.equal(mask[0], replicas[0][1][0]) for _, mask in replicas)
