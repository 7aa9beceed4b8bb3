"""The training loop, its twin in one process, and the exam on held-out data."""

import copy

import pytest
import torch
from torch import nn

from halocline.comm.single import SingleComm
from halocline.comm.threads import run_threads
from halocline.data.score import average_precision
from halocline.errors import HaloclineError
from halocline.feed import EntryFeed, MeshFeed
from halocline.models.mesh_tangling import mini_mesh
from halocline.models.zoo import Entry
from halocline.step import parallelize
from halocline.train import Exam, Recipe, Twin, train

FEATURES = Entry(
    "features",
    lambda size, width: nn.Identity(),
    lambda size, n, seed: tuple(torch.randn(2, n, 1, size, size, generator=torch.Generator().manual_seed(seed))),
    nn.MSELoss,
    16,
    2,
    "noise to noise",
)


def small_mesh(dtype=torch.float64):
    torch.manual_seed(0)
    return mini_mesh(32, (8, 12)).to(dtype), MeshFeed(32, 4, 16, dtype, seed=0)


def test_training_beats_the_best_constant_and_agrees_with_one_process():
    whole, feed = small_mesh()

    def rank(comm):
        net = copy.deepcopy(whole)
        step = parallelize(net, nn.MSELoss(), feed.like(), "spatial", comm=comm)
        twin = Twin(step, feed) if comm.rank == 0 else None
        exam = Exam(net, MeshFeed(32, 4, 8, torch.float64, seed=1), 2, "spatial", comm)
        before = exam.average_precision()
        done = list(train(step, feed, Recipe("adam", 1e-2), 60, twin))
        assert [trained.number for trained in done] == list(range(60)) and net.training
        return before, exam.average_precision(), [trained.loss for trained in done], twin and twin.agreement()

    (before, after, losses, agreement), (_, other_after, other_losses, _) = run_threads(2, rank)
    assert losses == other_losses and after == other_after
    share = torch.cat([small_mesh()[1].whole(number)[1] for number in range(4)]).mean()
    assert sum(losses[-8:]) / 8 < 0.85 * share * (1 - share)  # what the best constant gives
    assert after > before + 0.1
    assert agreement.passed and agreement.steps == 60
    assert str(agreement).startswith("agrees with one process at each of 60 steps: loss within ")


@pytest.mark.parametrize("plan", ["spatial", "n=2", {"conv1_*": "h=2", "*": "w=2"}])
def test_the_exam_is_that_of_one_process(plan):
    net, _ = small_mesh(torch.float32)
    held_out = MeshFeed(32, 4, 8, torch.float32, seed=1)
    with torch.no_grad():
        net.eval()
        scores = torch.cat([net(held_out.whole(number)[0]) for number in range(2)])
    expected = average_precision(scores, torch.cat([held_out.whole(number)[1] for number in range(2)]))
    for got in run_threads(2, lambda comm: Exam(copy.deepcopy(net), held_out, 2, plan, comm).average_precision()):
        assert got == pytest.approx(expected, abs=1e-6)


def test_the_exam_takes_the_plan_of_a_file():
    whole, feed = small_mesh()

    def rank(comm):
        net = copy.deepcopy(whole)
        step = parallelize(net, nn.MSELoss(), feed.like(), "spatial", comm=comm)
        plan = type(step.plan).from_json(step.plan.to_json())
        return Exam(net, feed, 1, plan, comm).average_precision()

    assert len(set(run_threads(2, rank))) == 1


@pytest.mark.parametrize("what", ["gradient", "loss", "buffer"])
def test_the_twin_sees_what_is_wrong(what):
    net, feed = small_mesh()
    step = parallelize(net, nn.MSELoss(), feed.like(), comm=SingleComm())
    twin = Twin(step, feed)
    loss = step(*feed.whole(0))
    loss.backward()
    twin.compare(0, loss, net)
    assert twin.agreement().passed
    if what == "gradient":
        net.head.weight.grad.add_(1e-6)
    elif what == "loss":
        loss = loss + 1e-6
    twin.model.load_state_dict(net.state_dict())
    for mine, theirs in zip(twin.model.buffers(), small_mesh()[0].buffers()):
        mine.data.copy_(theirs)  # as before the step
    if what == "buffer":
        net.bn1_1.running_mean.add_(1e-6)
    twin.compare(0, loss, net)
    agreement = twin.agreement()
    assert not agreement.passed and str(agreement).startswith("DOES NOT AGREE with one process")


def test_a_twin_draws_what_the_split_net_drew():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 1, 1)).double()
    feed = EntryFeed(FEATURES, 16, 2, torch.float64, seed=0)

    def rank(comm):
        step = parallelize(copy.deepcopy(net), nn.MSELoss(), feed.like(), "spatial", comm=comm)
        twin = Twin(step, feed) if comm.rank == 0 else None
        list(train(step, feed, Recipe("sgd", 0.1), 4, twin))
        return twin and twin.agreement()

    agreement, _ = run_threads(2, rank)
    assert agreement.passed and agreement.steps == 4 and agreement.loss > 0, str(agreement)


def test_divergence_and_unknown_optimizers_stop():
    net, feed = small_mesh(torch.float32)
    step = parallelize(net, nn.MSELoss(), feed.like(), comm=SingleComm())
    with torch.no_grad():
        net.head.weight.fill_(torch.nan)
    with pytest.raises(HaloclineError, match=r"the loss is nan at step 0.*smaller learning rate than 0.1"):
        list(train(step, feed, Recipe("sgd", 0.1), 3))
    with pytest.raises(HaloclineError, match="there are sgd and adam"):
        Recipe("lion", 0.1).make(net.parameters())
