"""Recomputed segments give bit for bit what segments that keep everything give, in less memory."""

import copy
import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from halocline.capture import capture
from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.errors import PlanError
from halocline.placement import Plan
from halocline.program import Again
from halocline.recompute import segments
from halocline.step import Step, parallelize

X, Y = torch.randn(4, 3, 18, 14), torch.randn(4, 3, 18, 14)


class Block(nn.Module):
    """Everything that must not happen twice, or must happen the same twice."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.drop, self.wide = nn.Dropout(0.3), nn.Conv2d(channels, channels, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(F.relu(self.norm(self.conv(x)), inplace=True))
        return x + F.relu(self.wide(y)) * y.mean((2, 3), keepdim=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 4, 3, padding=1), nn.ModuleList(Block(4) for _ in range(3))
        self.down, self.head = nn.MaxPool2d(2), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = skip = F.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(torch.cat([F.interpolate(self.down(x), size=skip.shape[2:]), skip], 1))


def trained(model: nn.Module, comm: Comm, plan: str, recompute: tuple[str, ...]) -> tuple[list[Tensor], Step]:
    """Losses, gradients and buffers of three steps, two forward passes before one backward pass among them."""
    torch.manual_seed(0)
    step = parallelize(copy.deepcopy(model), nn.MSELoss(), (X, Y), plan, comm=comm, seed=5, recompute=recompute)
    optimizer = torch.optim.SGD(step.parameters(), 0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        first, second = step(*step.scatter(X, Y)), step(*step.scatter(X.flip(0), Y))
        (first + second).backward()
        losses += [first.detach(), second.detach()]
        optimizer.step()
    grads = [p.grad for p in step.parameters() if p.grad is not None]
    return [*losses, *grads, *step.model.buffers()], step


@pytest.mark.parametrize("plan", ["h=3", "n=2,w=2"])
@pytest.mark.parametrize("recompute", [("blocks.*",), ("*",), ("blocks.1", "stem")], ids=["blocks", "all", "two"])
def test_recomputed_is_bit_for_bit_the_same(plan: str, recompute: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = Net()

    def rank(comm: Comm) -> None:
        (want, _), (found, step) = trained(model, comm, plan, ()), trained(model, comm, plan, recompute)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        assert any(isinstance(instruction, Again) for instruction in step.program.backward)
        assert int(step.model.blocks[1].norm.num_batches_tracked) == 4

    run_threads(3 if plan == "h=3" else 4, rank, timeout_s=120)


def live_bytes() -> int:
    gc.collect()
    tensors = [x for x in gc.get_objects() if torch.is_tensor(x) and not isinstance(x, FakeTensor)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def test_less_is_kept_for_the_backward_pass() -> None:
    """Of 16 convolutions and 16 activations, each with its input, the 4 that enter a segment."""

    def rank(comm: Comm) -> None:
        layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GELU()) for _ in range(16)]
        model, x = (
            nn.Sequential(*(nn.Sequential(*layers[i : i + 4]) for i in range(0, 16, 4))),
            torch.randn(2, 4, 64, 64),
        )
        kept = []
        for recompute in ((), ("*",)):
            step = parallelize(model, nn.MSELoss(), (x, x), "h=1", comm=comm, recompute=recompute)
            before = live_bytes()
            loss = step(x, x)
            kept.append(live_bytes() - before)
            loss.backward()
            del loss
        assert kept[1] < 0.25 * kept[0]

    run_threads(1, rank)


def test_segments_are_named_by_module_and_part_of_the_plan() -> None:
    graph, _ = capture(Net(), nn.MSELoss(), (X, Y))
    found = segments(graph, ["blocks.*", "head"])
    assert len(found) == 4 and all(len(names) > 5 for names in found[:3]) and len(found[3]) == 1
    with pytest.raises(PlanError, match="no layer is in a module named like `encoder"):
        segments(graph, ["encoder*"])

    def rank(comm: Comm) -> None:
        plan = parallelize(Net(), nn.MSELoss(), (X, Y), "h=1", comm=comm, recompute=("blocks.*",)).plan
        assert plan.recompute == found[:3]
        assert Plan.from_json(plan.to_json()) == plan
        step = parallelize(Net(), nn.MSELoss(), (X, Y), replace(plan, recompute=found[:1]), comm=comm)
        assert sum(isinstance(instruction, Again) for instruction in step.program.backward) == 1
        assert "Again" in str(step.program) and "recompute" in str(step.plan)

    run_threads(1, rank)
