"""Whole networks, split in every way, give the numbers of one process: loss, gradients, buffers, and after training."""

import copy

import pytest
import torch

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.step import parallelize
from halocline.verify import Report, verify
from tests.nets import NETS, phrase

CASES = [(name, plan, ranks) for name, net in NETS.items() for plan in net.plans for ranks in (2, 3, 4)]


@pytest.mark.parametrize(("name", "plan", "ranks"), [case for case in CASES if case[0] != "resnet50" or case[2] == 4])
def test_network_equals_one_process(name: str, plan: str, ranks: int) -> None:
    model, loss, batch = NETS[name].make()
    if plan == "sample" and batch[0].shape[0] < ranks:
        pytest.skip("fewer samples than ranks")

    def rank(comm: Comm) -> Report:
        return verify(copy.deepcopy(model), copy.deepcopy(loss), batch, phrase(plan, ranks), comm=comm)

    for report in run_threads(ranks, rank, timeout_s=300):
        assert report.passed, str(report)


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["mesh-2k-batch", "resnet-small"])
def test_twenty_steps_of_training_stay_with_one_process(name: str, optimizer: str) -> None:
    model, loss, batch = NETS[name].make()
    plain = copy.deepcopy(model)
    one_process = OPTIMIZERS[optimizer](plain.parameters())
    losses = []
    for _ in range(20):
        one_process.zero_grad()
        value = loss(plain(batch[0]), batch[1])
        value.backward()
        losses.append(value.item())
        one_process.step()

    def rank(comm: Comm) -> tuple[list[float], dict[str, torch.Tensor]]:
        mine = copy.deepcopy(model)
        step = parallelize(mine, loss, batch, "spatial", comm=comm)
        split = OPTIMIZERS[optimizer](step.parameters())
        found = []
        for _ in range(20):
            split.zero_grad()
            value = step(*step.scatter(*batch))
            value.backward()
            found.append(value.item())
            split.step()
        return found, step.state_dict()

    assert losses[-1] < losses[0]
    for found, state in run_threads(3, rank, timeout_s=300):
        assert found == pytest.approx(losses, rel=1e-8)
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-8, atol=1e-8)
