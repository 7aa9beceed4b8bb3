"""What tracing a model would drop is refused, where it matters, and kept where it can be."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halocline.capture import capture
from halocline.comm.single import SingleComm
from halocline.errors import CaptureError
from halocline.step import parallelize
from tests.cases.compare import assert_equal_to_one_process

X = torch.randn(2, 3, 12, 10)


class Swish(torch.autograd.Function):
    """Saves memory: its backward is the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * s * (1 + x * (1 - s))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Net(nn.Module):
    """A convolution with batch norm; `look` does something in the middle."""

    def __init__(self, look: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm, self.look = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), look
        self.count, self.seen, self.kept = 0, None, None

    def body(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.look(self, x)


def count(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    return net.body(x)


def carry(net: Net, x: Tensor) -> Tensor:
    y = net.body(x)
    net.kept = y if net.kept is None else net.kept * 0.5 + y
    return net.kept


def look_on(net: Net, x: Tensor) -> Tensor:
    net.seen, net.kept = tuple(x.shape), net.body(x)
    return net.kept * 2


def hooked(net: Net, x: Tensor) -> Tensor:
    y = net.body(x)
    y.register_hook(lambda grad: grad * 2)
    return y * 1


def test_a_gradient_of_its_own_that_is_the_derivative() -> None:
    assert_equal_to_one_process(lambda: Net(lambda net, x: Swish.apply(net.body(x))), [X], "h=2")


@pytest.mark.parametrize("reentrant", [False, True])
def test_c53_checkpoints_are_traced_as_plain_calls(reentrant: bool) -> None:
    """Batch norm's buffers are updated once a step: not twice, as the recomputation of a checkpoint does it."""
    net = Net(lambda net, x: checkpoint(net.body, x, use_reentrant=reentrant) + x)
    plain = copy.deepcopy(net)
    plain.look = lambda net, x: net.body(x) + x
    net, plain, x = net.double(), plain.double(), X.double()
    step = parallelize(net, None, [x], "whole", comm=SingleComm())
    for run in (step, plain):
        for _ in range(3):
            run(x).square().sum().backward()
    assert net.norm.num_batches_tracked == plain.norm.num_batches_tracked == 3
    torch.testing.assert_close(net.norm.running_var, plain.norm.running_var)
    for mine, theirs in zip(net.parameters(), plain.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize(
    ("look", "what"),
    [
        (lambda net, x: Reversed.apply(net.body(x)), r"`Reversed.backward` gives is not the derivative"),
        (hooked, "hook on the gradient of an activation"),
        (count, r"test_watched.py|`count` changes in every forward pass"),
        (carry, "`kept` changes in every forward pass"),
    ],
    ids=["function", "tensor hook", "counter", "tensor of the last step"],
)
def test_what_would_be_dropped_is_refused(look: Callable[[Net, Tensor], Tensor], what: str) -> None:
    net = Net(look)
    before = dict(net.__dict__)
    with pytest.raises(CaptureError, match=what):
        capture(net, None, [X])
    assert net.__dict__ == before
    assert torch.autograd.Function.apply.__func__.__module__ == "torch.autograd.function"


def test_attributes_that_only_look_on_are_left_alone() -> None:
    net = Net(look_on)
    graph, _ = capture(net, None, [X])
    assert len(graph.outputs) == 1
    assert (net.seen, net.kept) == (None, None)


def test_hooks() -> None:
    net = Net(lambda net, x: net.body(x))
    handle = net.conv.register_forward_hook(lambda module, args, output: output * 2)
    assert [node.op for node in capture(net, None, [X])[0].nodes].count("mul") == 1
    handle.remove()
    net.conv.register_forward_hook(lambda module, args, output: print(output.shape))
    with pytest.raises(CaptureError, match=r"`model.conv` has a forward hook `test_hooks.*returns nothing"):
        capture(net, None, [X])
    net = Net(lambda net, x: net.body(x))
    net.norm.register_full_backward_hook(lambda module, given, grad: None)
    with pytest.raises(CaptureError, match=r"`model.norm` has a backward hook"):
        capture(net, None, [X])
