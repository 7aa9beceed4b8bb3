"""K08, K09: statistics over the whole, counted right, stable, and running statistics as one process keeps them."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.step import parallelize
from tests.cases.compare import assert_equal_to_one_process


@pytest.mark.parametrize("momentum", [1.0, 0.1])
def test_c29_unbiased_variance_of_unequal_parts(momentum: float) -> None:
    x = torch.randn(2, 3, 7, 5, dtype=torch.float64) * torch.arange(1, 8)[:, None]
    build = partial(nn.BatchNorm2d, 3, momentum=momentum)
    assert_equal_to_one_process(build, [x], "h=3", "n=2,h=2", "w=5", steps=3)


@pytest.mark.parametrize("arguments", [{"momentum": None}, {"track_running_stats": False}, {"affine": False}])
def test_c30_kinds_of_running_statistics(arguments: dict[str, object]) -> None:
    x = torch.randn(2, 4, 9, 6)
    build = partial(nn.BatchNorm2d, 4, **arguments)
    assert_equal_to_one_process(build, [x], "h=2", "n=2,w=3", steps=5)
    model = build().double()
    for _ in range(5):
        model(x.double())
    assert_equal_to_one_process(lambda: model.eval(), [x], "h=2", "w=4")
    assert model.num_batches_tracked is None or model.num_batches_tracked == 5


def test_c31_one_value_per_channel() -> None:
    assert_equal_to_one_process(partial(nn.BatchNorm2d, 4), [torch.randn(1, 4, 2, 2)], "h=2,w=2", "h=2")

    def rank(comm: Comm) -> str:
        model, x = nn.BatchNorm2d(4), torch.randn(1, 4, 1, 1)
        with pytest.raises(Exception, match="more than 1 value per channel"):
            parallelize(model, None, [x], "whole", comm=comm)
        return "refused"

    assert run_threads(2, rank) == ["refused"] * 2


def test_c34_group_norm_of_uneven_parts_far_from_zero() -> None:
    build = partial(nn.GroupNorm, 4, 8)
    x = torch.randn(2, 8, 9, 7)
    assert_equal_to_one_process(build, [x], "h=2,w=2", "h=3", "n=2")
    torch.manual_seed(0)
    model, far = build(), x + 1000
    exact = model.double()(far.double())
    model = model.float()
    alone = float((model(far) - exact).abs().max())

    def rank(comm: Comm) -> float:
        step = parallelize(model, None, [far], "h=2,w=2", comm=comm)
        with torch.no_grad():
            return float((step.gather(step(*step.scatter(far))) - exact).abs().max())

    assert max(run_threads(4, rank)) <= 2 * alone

    with torch.autocast("cpu", torch.bfloat16):
        half = float((model(far.bfloat16()).double() - exact).abs().max())

    def rank_in_half(comm: Comm) -> float:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            step = parallelize(model, None, [far.bfloat16()], "h=2,w=2", comm=comm)
            return float((step.gather(step(*step.scatter(far.bfloat16()))).double() - exact).abs().max())

    assert max(run_threads(4, rank_in_half)) <= 2 * half


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.layer = nn.LayerNorm([4, 9, 7])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.instance(x))


def test_instance_and_layer_norm() -> None:
    assert_equal_to_one_process(Norms, [torch.randn(2, 4, 9, 7)], "h=2", "n=2,w=3", steps=2)
