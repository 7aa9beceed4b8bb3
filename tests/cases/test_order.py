"""K14, K16: ranks that do different things, or the same in another order, all stop with an error; none waits."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.errors import CaptureError, CommError, SignatureError
from halocline.step import Step, parallelize
from tests.cases.compare import assert_equal_to_one_process, assert_same, one_process

X, Y = torch.randn(2, 3, 12, 10).double(), torch.randn(2, 3, 12, 10).double()


def all_raise(ranks: int, act: Callable[[Step, int], object], error: type[Exception], match: str) -> None:
    """Every rank raises `error` when they `act`."""
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, padding=1)).double()

    def rank(comm: Comm) -> str:
        step = parallelize(copy.deepcopy(model), nn.MSELoss(), (X, Y), "h=" + str(ranks), comm=comm)
        with pytest.raises(error, match=match):
            act(step, comm.rank)
        return "raised"

    assert run_threads(ranks, rank, timeout_s=20) == ["raised"] * ranks


def test_c54_backward_passes_in_another_order() -> None:
    def act(step: Step, rank: int) -> None:
        parts = step.scatter(X, Y)
        losses = [step(*parts), step(*parts)]
        for loss in reversed(losses) if rank == 2 else losses:
            loss.backward()

    all_raise(
        4, act, SignatureError, r"what they do next: ranks 0, 1, 3 `the backward pass of step 1`, rank 2 `.* step 2`"
    )


def test_c54_in_the_same_order_gradients_add_up() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 3, 3, padding=1).double()
    plain = copy.deepcopy(model)
    (F.mse_loss(plain(X), Y) + F.mse_loss(plain(Y), X)).backward()

    def rank(comm: Comm) -> None:
        mine = copy.deepcopy(model)
        step = parallelize(mine, nn.MSELoss(), (X, Y), "h=4", comm=comm)
        losses = [step(*step.scatter(X, Y)), step(*step.scatter(Y, X))]
        for loss in reversed(losses):
            loss.backward()
        assert_same("weight", mine.weight.grad, plain.weight.grad)

    run_threads(4, rank)


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (lambda step, rank: step.train(rank == 0) and step(*step.scatter(X, Y)), r"rank 1 `\w*model.training = False"),
        (lambda step, rank: step(*step.scatter(X[: 1 + rank], Y[: 1 + rank])), r"the batch's shapes and dtypes"),
        (lambda step, rank: step(*step.scatter(*((X, Y) if rank else (X.float(), Y.float())))), "shapes and dtypes"),
        (lambda step, rank: step.model[0].requires_grad_(rank == 0) and step(*step.scatter(X, Y)), "are trained"),
        (lambda step, rank: [step(*step.scatter(X, Y)).backward() for _ in range(1 + rank)], "awaits|returned|ended"),
        (lambda step, rank: step(*step.scatter(X, Y)).backward() if rank else [step(*step.scatter(X, Y)) for _ in "xy"],
         "what they do next: rank 0 `a forward pass`, rank 1 `the backward pass of step 1`"),
    ],
    ids=["mode", "shape", "dtype", "frozen", "one step more", "no backward"],
)  # fmt: skip
def test_ranks_that_diverge(act: Callable[[Step, int], object], what: str) -> None:
    if what.startswith("awaits"):  # rank 0 has gone: only rank 1 can tell

        def one_more(step: Step, rank: int) -> None:
            act(step, rank)
            if rank == 0:
                raise CommError("awaits no more")

        all_raise(2, one_more, CommError, what)
    else:
        all_raise(2, act, SignatureError, what)


class Chooses(nn.Module):
    """Python code that looks at the values of tensors."""

    def __init__(self, choose: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.choose = nn.Conv2d(3, 3, 3, padding=1), choose

    def forward(self, x: Tensor) -> Tensor:
        return self.choose(self.conv, x)


def branch(conv: nn.Module, x: Tensor) -> Tensor:
    return conv(x) if x.mean() > 0 else x


def loop(conv: nn.Module, x: Tensor) -> Tensor:
    while x.abs().max() > 1:
        x = conv(x) / 2
    return x


def mask(conv: nn.Module, x: Tensor) -> Tensor:
    inside = x > 2
    return conv(x)[inside].sum() if inside.any() else conv(x).sum()


@pytest.mark.parametrize("choose", [branch, loop, mask])
def test_c61_branches_on_values_are_refused_with_their_line(choose: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model = Chooses(choose)

    def rank(comm: Comm) -> None:
        with pytest.raises(CaptureError, match=r"test_order.py:\d+.*Python control flow must not depend on values"):
            parallelize(copy.deepcopy(model), None, [X.float()], "h=2", comm=comm)

    run_threads(2, rank)


def test_c61_torch_where_follows_the_global_value() -> None:
    x = torch.full((1, 3, 12, 10), -1.0)
    x[:, :, 6:] = 3.0
    chosen = Chooses(lambda conv, x: torch.where(x.mean() > 0, conv(x), x))
    torch.manual_seed(0)
    want = one_process(copy.deepcopy(chosen), [x]).outputs[0]
    assert not torch.equal(want, x)
    assert_equal_to_one_process(lambda: chosen, [x], "h=2", "w=3")
