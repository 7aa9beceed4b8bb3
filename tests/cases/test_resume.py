"""K14, K15: other sizes and modes of a planned net; training saved on one split and resumed on another."""

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.step import parallelize
from tests.cases.compare import assert_same


class Tied(nn.Module):
    """A convolution used twice, with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.again, self.norm, self.head = self.shared, nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.again(self.norm(self.shared(self.first(x))))))


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}
BATCHES = [(torch.randn(2, 2, 8, 6).double(), torch.randn(2, 1, 8, 6).double()) for _ in range(5)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any, first: int, last: int) -> list[float]:
    losses = []
    for batch in BATCHES[first:last]:
        optimizer.zero_grad()
        loss = run(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_c57_resume_on_another_split(name: str) -> None:
    torch.manual_seed(0)
    model = Tied().double()
    plain = copy.deepcopy(model)
    optimizer = OPTIMIZERS[name](plain.parameters())
    want = train(plain, optimizer, lambda x, y: F.mse_loss(plain(x), y), 0, 5)

    def save(comm: Comm) -> bytes:
        mine = copy.deepcopy(model)
        step = parallelize(mine, nn.MSELoss(), BATCHES[0], "h=4", comm=comm)
        optimizer = OPTIMIZERS[name](step.parameters())
        assert train(mine, optimizer, lambda *b: step(*step.scatter(*b)), 0, 3) == pytest.approx(want[:3], rel=1e-9)
        assert list(step.state_dict()) == list(plain.state_dict())
        file = io.BytesIO()
        torch.save({"model": step.state_dict(), "optimizer": optimizer.state_dict()}, file)
        return file.getvalue()

    saved = run_threads(4, save)
    assert len({len(file) for file in saved}) == 1

    def resume(plan: str) -> Any:
        def rank(comm: Comm) -> None:
            state = torch.load(io.BytesIO(saved[0]), weights_only=True)
            mine = Tied().double()
            mine.load_state_dict(state["model"])
            step = parallelize(mine, nn.MSELoss(), BATCHES[0], plan, comm=comm)
            optimizer = OPTIMIZERS[name](step.parameters())
            optimizer.load_state_dict(state["optimizer"])
            found = train(mine, optimizer, lambda *b: step(*step.scatter(*b)), 3, 5)
            assert found == pytest.approx(want[3:], rel=1e-9)
            for key, value in plain.state_dict().items():
                assert_same(key, mine.state_dict()[key], value)

        return rank

    for plan, ranks in (("h=2,w=2", 4), ("n=2", 2), ("whole", 1)):
        run_threads(ranks, resume(plan))


def test_checkpoints_are_contiguous_where_the_program_puts_channels_last() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)), torch.randn(1, 3, 8, 8)

    def rank(comm: Comm) -> None:
        mine = copy.deepcopy(model)
        step = parallelize(mine, None, [x], "h=2", comm=comm)
        step(*step.scatter(x)).square().sum().backward()
        state = step.state_dict()
        assert all(value.is_contiguous() for value in state.values())
        assert not mine[0].weight.is_contiguous()  # else this tests nothing
        copy.deepcopy(model).load_state_dict(state)
        torch.testing.assert_close(state["0.weight"], model[0].weight.detach())

    run_threads(2, rank)


def test_c55_other_sizes_than_planned_are_planned_anew() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)).double()
    plain = copy.deepcopy(model)
    shapes = [(1, 3, 65, 47), (1, 3, 63, 47), (2, 3, 65, 47), (1, 3, 65, 47)]
    batches = [torch.randn(shape).double() for shape in shapes]
    want = [plain(x).detach() for x in batches]

    def rank(comm: Comm) -> None:
        step = parallelize(copy.deepcopy(model), None, batches[:1], "h=2", comm=comm)
        for x, y in zip(batches, want):
            assert_same("output", step.gather(step(*step.scatter(x))).detach(), y)

    run_threads(2, rank)
