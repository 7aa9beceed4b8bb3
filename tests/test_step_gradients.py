"""Which gradients a step leaves, and that they are those of one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halocline.errors import StepError
from halocline.region import Region
from halocline.step import Step
from tests.small_net import CLOSE, Net, assert_same_grads, batch_of, grads_of, on_ranks


def test_frozen_and_unused_parameters_get_no_gradient(net: Net) -> None:
    net.conv.bias.requires_grad_(False)
    net.head.weight.requires_grad_(False)
    batch = batch_of(4)

    def act(step: Step) -> dict[str, Tensor | None]:
        step(*step.scatter(*batch)).backward()
        return grads_of(step.model)

    found = on_ranks(3, net, act)
    F.cross_entropy(net(batch[0]), batch[1]).backward()
    assert grads_of(net)["unused"] is None and grads_of(net)["conv.bias"] is None
    for grads in found:
        assert_same_grads(grads, net)


def test_freezing_and_thawing_between_steps(net: Net) -> None:
    batch = batch_of(4)

    def act(step: Step) -> list[bool]:
        found = []
        for trained in (True, False, True):
            step.model.conv.requires_grad_(trained)
            step.zero_grad()
            step(*step.scatter(*batch)).backward()
            found.append(step.model.conv.weight.grad is not None)
        return found

    assert on_ranks(2, net, act) == [[True, False, True]] * 2


class TiedNames(nn.Module):
    """One tensor under two names, at two depths with other splits: a convolution's weight and a linear's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 3, 1, bias=False)
        self.again = nn.Conv2d(3, 3, 1)
        self.again.weight = self.embed.weight
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.again(torch.tanh(self.embed(x))))
        x = x.mean((2, 3)) @ self.embed.weight.flatten(1)
        return self.head(x)


@pytest.mark.parametrize("plan", ["sample", "spatial", "n=2,h=2"])
def test_tied_weights(plan: str) -> None:
    torch.manual_seed(0)
    model = TiedNames().double()
    batch = batch_of(4)

    def act(step: Step) -> dict[str, Tensor | None]:
        assert list(step.state_dict()) == list(model.state_dict())
        assert len(list(step.parameters())) == len(list(model.parameters()))
        step(*step.scatter(*batch)).backward()
        return grads_of(step.model)

    found = on_ranks(4, model, act, plan)
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    for grads in found:
        assert_same_grads(grads, model)


def test_no_sync_accumulates_as_one_process_does(net: Net) -> None:
    batches = [batch_of(4, seed=seed) for seed in range(6)]

    def act(step: Step) -> dict[str, Tensor | None]:
        for number, batch in enumerate(batches):
            if number % 3 < 2:
                with step.no_sync():
                    step(*step.scatter(*batch)).backward()
            else:
                step(*step.scatter(*batch)).backward()
        return grads_of(step.model)

    found = on_ranks(3, net, act)
    for batch in batches:
        F.cross_entropy(net(batch[0]), batch[1]).backward()
    for grads in found:
        assert_same_grads(grads, net)


def test_zero_grad_drops_what_no_sync_holds_back(net: Net) -> None:
    def act(step: Step) -> dict[str, Tensor | None]:
        with step.no_sync():
            step(*step.scatter(*batch_of(4, seed=1))).backward()
        step.zero_grad()
        step(*step.scatter(*batch_of(4))).backward()
        return grads_of(step.model)

    found = on_ranks(2, net, act)
    F.cross_entropy(net(batch_of(4)[0]), batch_of(4)[1]).backward()
    for grads in found:
        assert_same_grads(grads, net)


def test_no_sync_over_batches_that_are_split_otherwise_is_refused() -> None:
    """Of one row the first layer is not split, the second is."""
    model = nn.Sequential(
        nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 5, 3, padding=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    model.double()

    def act(step: Step) -> None:
        step(*step.scatter(*batch_of(4, rows=1))).backward()
        with step.no_sync():
            step(*step.scatter(*batch_of(4))).backward()
        with pytest.raises(
            StepError, match=r"no_sync held back gradients of 2 parameters \(`0\.bias`, .*split otherwise"
        ):
            step(*step.scatter(*batch_of(4, rows=1))).backward()

    on_ranks(2, model, act)


def test_clipping_by_the_global_norm(net: Net) -> None:
    batch = batch_of(4)

    def act(step: Step) -> tuple[Tensor, dict[str, Tensor | None]]:
        step(*step.scatter(*batch)).backward()
        return nn.utils.clip_grad_norm_(step.parameters(), 0.1, error_if_nonfinite=True), grads_of(step.model)

    found = on_ranks(4, net, act, "n=2,h=2")
    F.cross_entropy(net(batch[0]), batch[1]).backward()
    expected = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    assert expected > 0.1
    for norm, grads in found:
        torch.testing.assert_close(norm, expected, **CLOSE)
        assert_same_grads(grads, net)


@pytest.mark.parametrize("plan", ["sample", "spatial", "n=2,h=2"])
def test_gradients_of_the_input_are_the_plain_ones_region_by_region(net: Net, plan: str) -> None:
    batch = batch_of(4)

    def act(step: Step) -> tuple[Region, Tensor | None, Tensor | None]:
        x, y = step.scatter(*batch)
        x = x.clone().requires_grad_()
        step(x, y).backward()
        whole = batch[0].clone().requires_grad_()
        step(*step.scatter(whole, batch[1])).backward()
        return step.regions[0], x.grad, whole.grad

    found = on_ranks(4, net, act, plan)
    x = batch[0].clone().requires_grad_()
    F.cross_entropy(net(x), batch[1]).backward()
    assert x.grad is not None
    for region, part, whole in found:
        mine = region.within(Region.whole(x.shape))
        torch.testing.assert_close(part, x.grad[mine], **CLOSE)
        assert whole is not None
        torch.testing.assert_close(whole[mine], x.grad[mine], **CLOSE)
        whole[mine] = 0
        assert not whole.any()


def test_loss_with_parameters_of_its_own(net: Net) -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(output, target) * self.scale + self.scale.square()

    batch, plain_loss = batch_of(4), Weighted()

    def act(step: Step) -> tuple[Tensor | None, dict[str, Tensor | None]]:
        step(*step.scatter(*batch)).backward()
        return step.loss.scale.grad, grads_of(step.model)

    found = on_ranks(2, net, act, loss=plain_loss)
    plain_loss(net(batch[0]), batch[1]).backward()
    for scale, grads in found:
        torch.testing.assert_close(scale, plain_loss.scale.grad, **CLOSE)
        assert_same_grads(grads, net)
