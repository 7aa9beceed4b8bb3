"""K13: no gradient is lost, none is counted twice, and what has no gradient is left alone."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.errors import HaloclineError
from halocline.step import Step, parallelize
from tests.cases.compare import Passed, assert_equal_to_one_process, assert_same


def test_c47_gradients_of_the_input_and_the_first_layer() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 5, padding=2))

    def look(step: Step, passed: Passed) -> None:
        assert all(grad is not None for grad in (*passed.input_grads, *passed.grads.values()))

    assert_equal_to_one_process(build, [torch.randn(1, 2, 12, 14)], "w=2", "h=3", look=look)


def test_c48_global_norm_and_clipping() -> None:
    x, y = torch.randn(4, 3, 9, 8).double(), torch.randn(4, 2, 9, 8).double()
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3, padding=1)).double()
    plain = copy.deepcopy(model)
    F.mse_loss(plain(x), y).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, error_if_nonfinite=True)

    def rank(comm: Comm) -> None:
        mine = copy.deepcopy(model)
        step = parallelize(mine, nn.MSELoss(), (x, y), "n=2,h=2", comm=comm)
        step(*step.scatter(x, y)).backward()
        assert_same("norm", nn.utils.clip_grad_norm_(step.parameters(), 0.1, error_if_nonfinite=True), norm)
        for (name, parameter), whole in zip(mine.named_parameters(), plain.parameters()):
            assert_same(f"clipped gradient of {name}", parameter.grad, whole.grad)

    run_threads(4, rank)


class Branches(nn.Module):
    """A frozen encoder in evaluation mode, a branch that Python code switches on and off, and an unused head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)).requires_grad_(False)
        self.branch, self.head, self.unused = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.odd = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        return self.head(x + self.branch(x) if self.odd else x)


def test_c49_frozen_parts_unused_parts_and_a_branch_of_odd_steps() -> None:
    x, y = torch.randn(2, 3, 8, 7).double(), torch.randn(2, 4, 8, 7).double()

    def train(model: Branches, run: object) -> list[float]:
        model.train().encoder.eval()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
        losses = []
        for number in range(4):
            model.odd = number % 2 == 1
            optimizer.zero_grad()
            loss = run()  # type: ignore[operator]
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return losses

    torch.manual_seed(0)
    model = Branches().double()
    plain = copy.deepcopy(model)
    want = train(plain, lambda: F.mse_loss(plain(x), y))

    def rank(comm: Comm) -> None:
        mine = copy.deepcopy(model)
        mine.encoder.eval()
        step = parallelize(mine, nn.MSELoss(), (x, y), "h=2", comm=comm)
        assert train(mine, lambda: step(*step.scatter(x, y))) == pytest.approx(want, rel=1e-9)
        assert all(p.grad is None for p in (*mine.encoder.parameters(), *mine.unused.parameters()))
        for name, value in plain.state_dict().items():
            assert_same(name, mine.state_dict()[name], value)

    run_threads(2, rank)


def test_c50_second_derivatives_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.Tanh(), nn.Conv2d(4, 1, 3, padding=1))
    x = torch.randn(2, 1, 8, 8)

    def rank(comm: Comm) -> None:
        step = parallelize(copy.deepcopy(model), None, [x], "h=2", comm=comm)
        (part,) = step.scatter(x)
        part.requires_grad_()
        score = step(part).sum()
        with pytest.raises(HaloclineError, match="not twice differentiable"):
            (grad,) = torch.autograd.grad(score, part, create_graph=True)
            grad.norm().backward()

    run_threads(2, rank)


class Clipped(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(2, 2, 3, padding=1), nn.Parameter(torch.tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x * self.scale).clamp(-1, 1) + self.scale


def test_scalar_parameters_are_summed_once() -> None:
    assert_equal_to_one_process(partial(Clipped, 0.7), [torch.randn(2, 2, 7, 6)], "h=2,w=2", "n=2", "h=3")
