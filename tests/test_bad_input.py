"""Bad input ends in a clear error on every rank, within seconds; nothing hangs and nothing is silently wrong."""

import copy
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.errors import CaptureError, CommError, HaloclineError, PlanError, SignatureError, StepError
from halocline.placement import Plan
from halocline.region import Region
from halocline.step import Step, parallelize
from tests.processes import run

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attribute", "ignore:Using backward")

torch.manual_seed(0)
NET = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
BATCH = (torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))


def errors_of(ranks: int, act: Callable[[Comm], Any]) -> list[Exception]:
    """What `act(comm)` raises on each rank; it must raise on all of them, and soon."""

    def rank(comm: Comm) -> Exception:
        with pytest.raises(Exception) as raised:
            act(comm)
        return raised.value

    start_s = time.monotonic()
    errors = run_threads(ranks, rank, timeout_s=20)
    assert time.monotonic() - start_s < 15
    return errors


def step_of(comm: Comm, loss: Any = None, batch: tuple[Tensor, ...] = BATCH, plan: Any = "spatial") -> Step:
    return parallelize(copy.deepcopy(NET), loss or nn.CrossEntropyLoss(), batch, plan, comm=comm)


def refused(ranks: int, kind: type[HaloclineError], words: str, act: Callable[[Comm], Any]) -> None:
    for error in errors_of(ranks, act):
        assert isinstance(error, kind), repr(error)
        assert re.search(words, str(error)), str(error)


class OneConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)


class Branches(OneConv):
    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            x = x * 2
        return self.conv(x).mean((2, 3))


class ThroughNumpy(OneConv):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.conv(x).detach().numpy()).mean((2, 3))


class DataDependentShape(OneConv):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nonzero(x.sum((1, 2, 3)) > 0)[:, 0]
        return self.conv(x).mean((2, 3))[rows]


class Remembers(OneConv):
    previous: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        y = x if self.previous is None else x + self.previous
        self.previous = x.detach()
        return y.mean((2, 3))


class Counts(OneConv):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.conv(x).mean((2, 3)) / self.calls


class ChangesInput(OneConv):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.conv(x).mean((2, 3))


class WrongChannels(OneConv):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x[:, :2]).mean((2, 3))


class DrawsNoise(OneConv):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.poisson(x.abs())).mean((2, 3))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Branches, r"test_bad_input\.py:\d+: `if x\.mean\(\) > 0:`.* must not depend on values"),
        (ThroughNumpy, r"test_bad_input\.py:\d+: `return torch\.from_numpy"),
        (DataDependentShape, r"test_bad_input\.py:\d+: rows = torch\.nonzero.*depends on the values of tensors"),
        (
            Remembers,
            r"test_bad_input\.py:\d+: self\.previous = x\.detach\(\): `previous` changes in every forward pass",
        ),
        (Counts, r"test_bad_input\.py:\d+: self\.calls \+= 1: `calls` changes in every forward pass"),
        (ChangesInput, r"test_bad_input\.py:\d+: x\.mul_\(2\).*changes batch_0 in place"),
        (WrongChannels, r"test_bad_input\.py:\d+: `return self\.conv\(x\[:, :2\]\).*expected input.*3 channels"),
    ],
)
def test_model_that_cannot_be_captured_is_refused_with_its_line(kind: type[nn.Module], words: str) -> None:
    model = kind()
    act = lambda comm: parallelize(model, nn.CrossEntropyLoss(), BATCH, comm=comm)  # noqa: E731
    refused(2, CaptureError, words, act)


def test_model_that_draws_random_numbers_is_refused_with_its_line() -> None:
    model = DrawsNoise()
    words = r"poisson .*test_bad_input\.py:\d+: .*draws random numbers"
    refused(2, PlanError, words, lambda comm: parallelize(model, nn.CrossEntropyLoss(), BATCH, comm=comm))


@pytest.mark.parametrize(
    ("plan", "ranks", "words"),
    [
        ("spatal", 2, r"`spatal` is not a split\. Use sample, spatial, whole"),
        ("z=2", 2, r"`z=2` is not a split.*an index of n, c, f, d, h, w"),
        ("h", 2, r"`h` is not a split"),
        ("h=3", 2, r"plan `h=3` does not fit 2 ranks.*product be 2"),
        ("h=2,w=2", 2, r"plan `h=2,w=2` does not fit 2 ranks"),
        ("h=2", 4, r"plan `h=2` uses 2 of 4 ranks"),
        ("sample", 4, r"4 parts along index `n`, which is at most 2 long\. Use fewer ranks"),
        ("n=4", 4, r"4 parts along index `n`, which is at most 2 long"),
        ("n=4,h=2", 8, r"4 parts along index `n`, which is at most 2 long"),
        ("spatial", 9, r"9 parts along index `h`, which is at most 8 long"),
        ("d=2", 2, r"2 parts along index `d`, which is in no layer"),
        ({"layer9": "h=2"}, 2, r"no layer is named like `layer9` \(layers: 0, 1, 2, 3, 4, loss\)"),
        ({"4": "h=2"}, 2, r"no layer under `4` has an index `h`"),
        ({"4": "n=3"}, 3, r"linear `4`: index `n` \(size 2\) cannot be split in 3 .*1 parts would be empty"),
        ({"0": "wide"}, 2, r"`wide` is not a split"),
        (None, 2, r"None is not a phrase"),
        (7, 2, r"7 is not a phrase"),
    ],
)
def test_split_that_does_not_exist_or_is_too_fine_is_refused(
    plan: str | Mapping[str, str], ranks: int, words: str
) -> None:
    refused(ranks, PlanError, words, lambda comm: step_of(comm, plan=plan))


def test_plan_for_other_ranks_or_another_model_is_refused() -> None:
    plan = run_threads(4, lambda comm: step_of(comm).plan)[0]
    refused(2, PlanError, r"made for 4 ranks.*but 2 are running", lambda comm: step_of(comm, plan=plan))
    strange = Plan(plan.mesh, {**plan.splits, "conv2d_7": {"h": ("r0",)}}, plan.inputs)
    refused(4, PlanError, r"another model or batch: it names `conv2d_7`", lambda comm: step_of(comm, plan=strange))


def test_wrong_region_is_refused_on_every_rank() -> None:
    def whole(comm: Comm) -> None:
        step_of(comm)(*BATCH)

    def one_row_less_on_rank_1(comm: Comm) -> None:
        step = step_of(comm)
        x, y = step.scatter(*BATCH)
        step(x[:, :, 1:] if comm.rank == 1 else x, y)

    def wrong_dtype_on_rank_2(comm: Comm) -> None:
        step = step_of(comm)
        x, y = step.scatter(*BATCH)
        step(x.double() if comm.rank == 2 else x, y)

    def too_few_tensors(comm: Comm) -> None:
        step = step_of(comm)
        step(step.scatter(*BATCH)[0])

    refused(2, SignatureError, r"it got .*the whole tensor\. Pass step\.scatter", whole)
    words = (
        r"batch tensor 0 on rank 1: this rank's part is \[0:2, 0:3, 3:6, 0:8\] .*it got torch\.float32 \(2, 3, 2, 8\)"
    )
    refused(3, SignatureError, words, one_row_less_on_rank_1)
    refused(3, SignatureError, r"on rank 2: this rank's part .*it got torch\.float64", wrong_dtype_on_rank_2)
    refused(2, SignatureError, r"takes 2 tensors, as its batch has; it got 1", too_few_tensors)


def test_tensors_without_values_are_refused_where_values_are_needed() -> None:
    model = copy.deepcopy(NET).to("meta")
    words = r"`model\.0\.weight` is on the meta device.*to_empty"
    refused(2, StepError, words, lambda comm: parallelize(model, nn.CrossEntropyLoss(), BATCH, comm=comm))

    def parts(comm: Comm) -> None:
        step = step_of(comm)
        step(*step.scatter(*(x.to("meta") for x in BATCH)))

    refused(2, SignatureError, r"batch tensor 0 is on the meta device", parts)


def test_step_without_a_batch_is_refused() -> None:
    refused(2, StepError, r"knows no batch yet", lambda comm: parallelize(copy.deepcopy(NET), comm=comm).regions)


def test_a_refused_step_goes_on_with_the_right_parts() -> None:
    def rank(comm: Comm) -> float:
        step = step_of(comm)
        with pytest.raises(SignatureError):
            step(*BATCH)
        with pytest.raises(CaptureError):
            step.scatter(BATCH[0][:, :2], BATCH[1])
        parts = [x[region.within(Region.whole(x.shape))] for x, region in zip(BATCH, step.regions)]
        return step(*parts).item()

    expected = nn.CrossEntropyLoss()(NET(BATCH[0]), BATCH[1]).item()
    assert run_threads(2, rank) == pytest.approx([expected] * 2)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.CrossEntropyLoss(reduction="none"), r"one scalar.*it is float32\[2\]; reduce it"),
        (lambda output, target: (output.argmax(1) == target).sum(), r"floating-point dtype, but it is int64\[\]"),
        (lambda output, target: (output.sum(), output.mean()), r"float32\[\], float32\[\] in a tuple"),
        (lambda output, target: {"loss": output.sum()}, r"float32\[\] in a dict"),
    ],
)
def test_loss_that_is_no_scalar_is_refused(loss: Any, words: str) -> None:
    refused(2, StepError, words, lambda comm: step_of(comm, loss))


def test_second_backward_is_refused() -> None:
    def twice(comm: Comm) -> None:
        step = step_of(comm)
        loss = step(*step.scatter(*BATCH))
        loss.backward(retain_graph=True)
        loss.backward()

    refused(2, StepError, r"backward was called a second time", twice)


def test_double_backward_is_refused() -> None:
    def penalty(comm: Comm) -> None:
        step = step_of(comm)
        x, y = step.scatter(*BATCH)
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(step(x, y), x, create_graph=True)
        grad.square().sum().backward()

    def kept(comm: Comm) -> None:
        step = step_of(comm)
        step(*step.scatter(*BATCH)).backward(create_graph=True)

    for act in (penalty, kept):
        refused(2, StepError, r"create_graph=True, but a step is not twice differentiable", act)


def test_ranks_that_disagree_are_told_what_differs() -> None:
    def layers(comm: Comm) -> None:
        model = copy.deepcopy(NET)
        if comm.rank == 2:
            model[1] = nn.Sigmoid()
        parallelize(model, nn.CrossEntropyLoss(), BATCH, comm=comm)

    class Either(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.conv = copy.deepcopy(NET[0])
            self.forward = self.relu if rank < 2 else self.sigmoid

        def relu(self, x: Tensor) -> Tensor:
            return torch.relu(self.conv(x)).mean((2, 3))

        def sigmoid(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.conv(x)).mean((2, 3))

    def code(comm: Comm) -> None:
        model = Either(comm.rank)
        parallelize(model, nn.CrossEntropyLoss(), BATCH, comm=comm)

    def kernel(comm: Comm) -> None:
        model = copy.deepcopy(NET)
        if comm.rank == 2:
            model[0] = nn.Conv2d(3, 4, 5, padding=2)
        parallelize(model, nn.CrossEntropyLoss(), BATCH, comm=comm)

    def frozen_later(comm: Comm) -> None:
        step = step_of(comm)
        step.model[0].weight.requires_grad_(comm.rank != 2)
        step(*step.scatter(*BATCH))

    def inference_on_one(comm: Comm) -> None:
        step = step_of(comm)
        with torch.set_grad_enabled(comm.rank != 2):
            step(*step.scatter(*BATCH))

    def another_batch_on_one(comm: Comm) -> None:
        step = step_of(comm)
        for size in (8, 6, 8, 6 if comm.rank == 2 else 8):
            step(*step.scatter(BATCH[0][:, :, :size], BATCH[1])).backward()

    apart = r"the ranks disagree on {}: ranks 0, 1 `{}`, rank 2 `{}`\. Every rank must"
    refused(3, SignatureError, apart.format("model and weights", r"model\.1: ReLU", r"model\.1: Sigmoid"), layers)
    refused(3, SignatureError, r"the ranks disagree on .*ranks 0, 1 `.*relu.*`, rank 2 `.*sigmoid.*`", code)
    shapes = r"model\.0\.weight: \(4, 3, 3, 3\).*", r"model\.0\.weight: \(4, 3, 5, 5\).*"
    refused(3, SignatureError, apart.format("model and weights", *shapes), kernel)
    refused(3, SignatureError, apart.format("which parameters are trained", r"0\.weight", r"0\.bias"), frozen_later)
    refused(3, SignatureError, r"which parameters are trained: .*rank 2 `none", inference_on_one)
    sizes = r"tensor 0: float32\[2,3,8,8\] on cpu", r"tensor 0: float32\[2,3,6,8\] on cpu"
    refused(3, SignatureError, apart.format("the batch's shapes and dtypes", *sizes), another_batch_on_one)


def test_rank_that_fails_between_steps_stops_the_others() -> None:
    def act(comm: Comm) -> None:
        step = step_of(comm)
        parts = step.scatter(*BATCH)
        step(*parts).backward()
        if comm.rank == 1:
            comm.fail("OSError: the disk is full")
            raise OSError("the disk is full")
        step(*parts)

    own, other, third = (errors[i] for errors in [errors_of(3, act)] for i in (1, 0, 2))
    assert isinstance(own, OSError)
    for error in (other, third):
        assert isinstance(error, CommError) and "rank 1 failed: OSError: the disk is full" in str(error), repr(error)


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_processes_that_disagree_or_fail_end_together(transport: str) -> None:
    outcome = run("disagreements", 3, transport)
    assert outcome.code not in (0, None), outcome.text
    assert outcome.seconds < 60
    weight = r"ranks 0, 2 `model\.4\.bias: .*`, rank 1 `model\.4\.bias: "
    expected = {
        "weights": rf"model and weights: {weight}",
        "shapes": r"the batch's shapes and dtypes: .*\[4,3,8,8\].*rank 1 .*\[4,3,7,8\]",
        "dtypes": r"the batch's shapes and dtypes: ranks 0, 2 `tensor 0: float32.*rank 1 `tensor 0: float64",
        "plans": r"the plan: ranks 0, 2 `mesh r0 3 \(spatial\)`, rank 1 `mesh r0 3 \(sample\)`",
        "later_shapes": r"the batch's shapes and dtypes: .*\[4,3,8,8\].*rank 1 .*\[4,3,7,8\]",
        "modes": r"train/eval modes: ranks 0, 2 `.*training = True`, rank 1 `.*training = False`",
    }
    for rank in range(3):
        for differ, words in expected.items():
            told = rf"^rank {rank}, {differ}: the ranks disagree on {words}"
            assert re.search(told, outcome.text, re.MULTILINE), f"{told}\n{outcome.text}"
        assert f"rank {rank} goes on" in outcome.text
    assert re.search(r"rank 1.*MemoryError: no 7 GiB left.*adaptive_avg_pool2d `2`", outcome.text), outcome.text
    if transport == "gloo":  # MPI ends the others at once
        for rank in (0, 2):
            told = rf"CommError: rank {rank} of 3 .*rank 1 failed: MemoryError: no 7 GiB left"
            assert re.search(told, outcome.text), outcome.text


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_rank_that_is_killed_ends_the_others(transport: str) -> None:
    outcome = run("is_killed", 3, transport)
    assert outcome.code == 137, outcome.text
    assert outcome.seconds < 60
    assert "rank 1 was ended by SIGKILL" in outcome.text
    if transport == "gloo":
        for rank in (0, 2):
            assert re.search(rf"CommError: rank {rank} of 3 .*(connection is lost|failed)", outcome.text), outcome.text
