"""A step keeps the model's own names and modes, and in every use gives the numbers of one process."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import halocline.step
from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.step import Step, parallelize
from tests.small_net import CLOSE, Net, assert_same_grads, batch_of, grads_of, on_ranks


def test_names_are_the_models_own_and_checkpoints_load_both_ways(net: Net) -> None:
    other = copy.deepcopy(net)
    nn.init.ones_(other.conv.weight)

    def act(step: Step) -> None:
        assert list(step.state_dict()) == list(net.state_dict())
        assert [name for name, _ in step.named_parameters()] == [name for name, _ in net.named_parameters()]
        assert [name for name, _ in step.named_buffers()] == [name for name, _ in net.named_buffers()]
        assert len(list(step.parameters())) == len(list(net.parameters()))
        step.load_state_dict(other.state_dict())
        copy.deepcopy(net).load_state_dict(step.state_dict())
        assert torch.equal(step.model.conv.weight, other.conv.weight)
        with pytest.raises(RuntimeError, match="Missing key"):
            step.load_state_dict({})
        loss = step(*step.scatter(*batch_of(4)))
        torch.testing.assert_close(loss.detach(), F.cross_entropy(other(batch_of(4)[0]), batch_of(4)[1]).detach())

    on_ranks(2, net, act)


def test_train_and_eval_are_the_models_own(net: Net) -> None:
    batch = batch_of(4)
    plain = copy.deepcopy(net)
    expected = []
    for mode in (True, False, True):
        plain.train(mode)
        expected.append(F.cross_entropy(plain(batch[0]), batch[1]).item())

    def act(step: Step) -> tuple[list[float], dict[str, Tensor]]:
        found = []
        for mode in (True, False, True):
            step.train(mode)
            assert step.model.norm.training == mode
            found.append(step(*step.scatter(*batch)).item())
        return found, dict(step.named_buffers())

    for found, buffers in on_ranks(3, net, act):
        assert found == pytest.approx(expected, rel=1e-9)
        for name, value in plain.named_buffers():
            torch.testing.assert_close(buffers[name], value, **CLOSE)


def test_mode_of_one_module_counts(net: Net) -> None:
    """A frozen batch norm inside a net that trains, and back."""
    batch = batch_of(4)

    def one_process(model: nn.Module, step: Callable[..., Tensor], parts: Callable[[], Any]) -> list[float]:
        losses = []
        for frozen in (False, True, False):
            model.norm.train(not frozen)
            losses.append(step(*parts()).item())
        return losses

    plain = copy.deepcopy(net)
    expected = one_process(plain, lambda x, y: F.cross_entropy(plain(x), y), lambda: batch)
    found = on_ranks(2, net, lambda step: one_process(step.model, step, lambda: step.scatter(*batch)))
    assert found == [pytest.approx(expected, rel=1e-9)] * 2


class Several(Net):
    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.norm(self.conv(x)))
        return {"map": y, "logits": self.head(y.mean((2, 3))), "pair": (y.amax((2, 3)), x.argmax(1), x)}


@pytest.mark.parametrize("plan", ["sample", "spatial", "whole"])
def test_inference_gathers_to_the_plain_output(plan: str) -> None:
    torch.manual_seed(0)
    model = Several().double().eval()
    x, _ = batch_of(4)
    expected = model(x)

    def rank(comm: Comm) -> Any:
        step = parallelize(copy.deepcopy(model), batch=(x,), plan=plan, comm=comm)
        with torch.no_grad():
            part = step(*step.scatter(x))
        assert not any(leaf.requires_grad for leaf in tree_leaves(part))
        return step.gather(part)

    for found in run_threads(3, rank):
        assert list(found) == ["map", "logits", "pair"] and isinstance(found["pair"], tuple)
        for got, want in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            torch.testing.assert_close(got, want.detach(), **CLOSE)


def test_outputs_need_gradients_where_the_plain_ones_do() -> None:
    torch.manual_seed(0)
    model = Several().double()
    x, _ = batch_of(4)
    expected = [leaf.requires_grad for leaf in tree_leaves(model(x))]

    def rank(comm: Comm) -> list[bool]:
        step = parallelize(copy.deepcopy(model), batch=(x,), comm=comm)
        return [leaf.requires_grad for leaf in tree_leaves(step(*step.scatter(x)))]

    assert run_threads(2, rank) == [expected] * 2


def test_batches_of_changing_size_share_a_bounded_cache(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halocline.step, "CACHED_PROGRAMS", 3)
    made = []
    capture = halocline.step.capture
    monkeypatch.setattr(halocline.step, "capture", lambda *args: made.append(args) or capture(*args))
    sizes = [(4, 9), (4, 8), (3, 9), (4, 9), (1, 5), (4, 9), (4, 8)]
    batches = [batch_of(samples, rows, seed) for seed, (samples, rows) in enumerate(sizes)]

    def act(step: Step) -> tuple[list[float], int]:
        losses = [step(*step.scatter(*batch)).item() for batch in batches]
        return losses, len(step._programs)

    found = on_ranks(2, net, act)
    expected = [F.cross_entropy(net(x), y).item() for x, y in batches]
    for losses, kept in found:
        assert losses == pytest.approx(expected, rel=1e-9)
        assert kept == 3
    assert len(made) == 2 * 5  # (4, 8) was dropped and made again; (4, 9) stayed because it was used


def test_one_process_alone_needs_no_launcher(net: Net) -> None:
    batch = batch_of(4)
    plain = copy.deepcopy(net)
    step = parallelize(net, nn.CrossEntropyLoss())
    assert step.comm.size == 1
    for samples in (4, 2):  # one rank's part is the whole: no scatter, no batch announced
        x, y = batch[0][:samples], batch[1][:samples]
        loss, expected = step(x, y), F.cross_entropy(plain(x), y)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected, **CLOSE)
    assert_same_grads(grads_of(net), plain)


def test_a_batch_on_the_meta_device_plans_for_the_real_one(net: Net) -> None:
    batch = batch_of(4)

    def rank(comm: Comm) -> float:
        like = [x.to("meta") for x in batch]
        step = parallelize(copy.deepcopy(net), nn.CrossEntropyLoss(), like, "h=2", comm=comm)
        planned = step.program
        loss = step(*(x[tuple(slice(*i) for i in region.intervals)] for x, region in zip(batch, step.regions)))
        step.prepare(*batch)
        assert step.program is planned
        return loss.item()

    assert run_threads(2, rank) == pytest.approx([F.cross_entropy(net(batch[0]), batch[1]).item()] * 2, rel=1e-9)


def test_optimizer_made_before_or_after_is_the_same(net: Net) -> None:
    batch = batch_of(4)

    def trained(model: nn.Module, loss: Callable[..., Tensor], parts: Callable[[], Any]) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            value = loss(*parts())
            value.backward()
            losses.append(value.item())
            optimizer.step()
        return losses

    plain = copy.deepcopy(net)
    expected = trained(plain, lambda x, y: F.cross_entropy(plain(x), y), lambda: batch)
    by_model = on_ranks(2, net, lambda step: trained(step.model, step, lambda: step.scatter(*batch)))
    by_step = on_ranks(2, net, lambda step: trained(step, step, lambda: step.scatter(*batch)))
    assert by_model == by_step == [pytest.approx(expected, rel=1e-9)] * 2
