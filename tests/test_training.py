"""Training as people do it: whole loops with everything around a step stay with one process."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.errors import StepError
from halocline.step import Step, parallelize

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)))


def batch(seed: int, *size: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, c, *size, generator=generator, dtype=torch.float64) for c in (2, 1))  # type: ignore[return-value]


SIZES = [(9, 8), (12, 7), (9, 8), (10, 10)]


def epochs(model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
    """Accumulation, clipping, a schedule, an averaged copy, freezing and thawing, other sizes, evaluation between."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=8)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    seen = []
    for epoch in range(2):
        model.train()
        model.stem.requires_grad_(epoch == 1)
        model.stem[1].train(epoch == 1)
        for number, size in enumerate(SIZES):
            optimizer.zero_grad()
            for half in range(2):
                loss = loss_of(*batch(10 * number + half, *size)) / 2
                loss.backward()
                seen.append(loss.item())
            seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
        model.eval()
        with torch.no_grad():
            seen.append(loss_of(*batch(99, 9, 8)).item())
            seen.append(float(average(batch(99, 9, 8)[0]).square().mean()))
    return seen


def test_a_loop_with_everything_around_it() -> None:
    torch.manual_seed(0)
    model = Net().double()
    plain = copy.deepcopy(model)
    want = epochs(plain, lambda x, y: nn.functional.mse_loss(plain(x), y))

    def rank(comm: Comm) -> None:
        mine = copy.deepcopy(model)
        step = parallelize(mine, nn.MSELoss(), plan=f"h={comm.size}", comm=comm)
        assert epochs(mine, lambda x, y: step(*step.scatter(x, y))) == pytest.approx(want, rel=1e-7)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-7, atol=1e-9)

    run_threads(3, rank, timeout_s=240)
    assert all(map(math.isfinite, want))


def test_a_step_is_not_copied_but_its_model_is() -> None:
    def rank(comm: Comm) -> None:
        step = parallelize(Net(), nn.MSELoss(), plan="h=1", comm=comm)
        with pytest.raises(StepError, match=r"Copy its model, `step.model`"):
            copy.deepcopy(step)
        copy.deepcopy(step.model)

    run_threads(1, rank)


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model)  # type: ignore[return-value]


def inside(model: Net) -> nn.Module:
    model.body = torch.compile(model.body)  # type: ignore[assignment]
    return model


def in_place(model: Net) -> nn.Module:
    model.compile()
    return model


@pytest.mark.parametrize("compiled", [whole, inside, in_place, None])
def test_torch_compile_around_and_inside(compiled: Callable[[Net], nn.Module] | None) -> None:
    """What is compiled inside is captured as it was written; around a step, the step runs as it is."""
    torch.manual_seed(0)
    model, (x, y) = Net().double(), batch(0, 9, 8)
    plain = copy.deepcopy(model)
    loss = nn.functional.mse_loss(plain(x), y)
    loss.backward()

    def rank(comm: Comm) -> None:
        mine = copy.deepcopy(model)
        step: Step = parallelize(compiled(mine) if compiled else mine, nn.MSELoss(), (x, y), plan="h=2", comm=comm)
        found = (step if compiled else torch.compile(step))(*step.scatter(x, y))
        found.backward()
        torch.testing.assert_close(found, loss)
        for p, q in zip(mine.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)

    run_threads(2, rank, timeout_s=120)
