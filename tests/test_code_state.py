"""A step captures its model anew when what its code can see has changed: attributes, methods, hooks."""

import copy
import types

import pytest
import torch
from torch import Tensor, nn

from halocline.code_state import CodeWatch
from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.errors import SignatureError
from halocline.step import parallelize


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale, self.sizes = nn.Conv2d(3, 3, 3, padding=1), 1.0, (1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.scale + self.sizes[1]


def double(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output * 2


def change_attribute(net: Net) -> None:
    net.scale = 3.0


def change_tuple(net: Net) -> None:
    net.sizes = (1, 5)


def patch_forward(net: Net) -> None:
    net.conv.forward = types.MethodType(lambda self, x: self._conv_forward(x * 2, self.weight, None), net.conv)


def add_hook(net: Net) -> None:
    net.conv.register_forward_hook(double)


def replace_layer(net: Net) -> None:
    torch.manual_seed(7)
    net.conv = nn.Conv2d(3, 3, 3, padding=1).double()


CHANGES = [change_attribute, change_tuple, patch_forward, add_hook, replace_layer]


@pytest.mark.parametrize("change", CHANGES)
def test_c40_changes_after_planning_count(change: types.FunctionType) -> None:
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(1, 3, 10, 8).double()
    plain = copy.deepcopy(net)

    def rank(comm: Comm) -> tuple[Tensor, Tensor, int]:
        mine = copy.deepcopy(net)
        step = parallelize(mine, None, [x], "h=2", comm=comm)
        parts = step.scatter(x)
        before = step.gather(step(*parts))
        change(mine)
        after = step.gather(step(*parts))
        step(*step.scatter(x))
        return before, after, len(step._programs)

    before = plain(x)
    change(plain)
    for found in run_threads(2, rank):
        torch.testing.assert_close(found[0], before)
        torch.testing.assert_close(found[1], plain(x))
        assert found[2] == 2
    assert not torch.allclose(before, plain(x))


def test_a_parameter_that_is_replaced_needs_no_new_program() -> None:
    net, x = Net(), torch.randn(1, 3, 10, 8)

    def rank(comm: Comm) -> None:
        mine = copy.deepcopy(net)
        step = parallelize(mine, None, [x], "h=2", comm=comm)
        parts = step.scatter(x)
        step(*parts)
        mine.conv.weight = nn.Parameter(net.conv.weight.detach() * 2)
        found = step.gather(step(*parts))
        torch.testing.assert_close(found, mine(x))
        assert len(step._programs) == 1
        mine.conv.weight = nn.Parameter(mine.conv.weight.detach(), requires_grad=False)
        step(*parts).sum().backward()
        assert len(step._programs) == 2 and mine.conv.weight.grad is None and mine.conv.bias.grad is not None

    run_threads(2, rank)


def test_a_change_on_one_rank_only_is_an_error_on_all() -> None:
    net, x = Net(), torch.randn(1, 3, 10, 8)

    def rank(comm: Comm) -> None:
        mine = copy.deepcopy(net)
        step = parallelize(mine, None, [x], "h=2", comm=comm)
        mine.scale = 2.0 if comm.rank else 1.0
        with pytest.raises(SignatureError, match=r"attributes.*rank 0 `model.scale = 1.0`.*rank 1 `model.scale = 2.0`"):
            step(*step.scatter(x))

    run_threads(2, rank)


def test_what_is_seen_is_the_same_in_every_process() -> None:
    states = [CodeWatch(net).now() for net in (Net(), Net())]
    assert states[0] == states[1] and repr(states[0]) == repr(states[1])
    assert "conv.stride = (1, 1)" in repr(states[0]) and " at 0x" not in repr(states[0])
    watch = CodeWatch(net := Net())
    first = watch.now()
    assert watch.now() is first
    net.other = 5
    assert watch.now() != first
