"""What torch.export alone does not follow: batch norm without momentum, noise drawn in place, odd outputs."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halocline.capture import capture
from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.step import parallelize
from halocline.verify import verify


class StochasticDepth(nn.Module):
    """As torchvision and timm write it: a residual branch is left out for some samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        noise = torch.empty([x.shape[0], 1, 1, 1], dtype=x.dtype).bernoulli_(0.5)
        noise.div_(0.5)
        like = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.8)
        return x + self.second(x) * noise + like * torch.zeros_like(x).uniform_(-1, 1) + x.clone().normal_(0, 0.1)


class Averaged(nn.Module):
    """Its running statistics are the mean over all batches; a second norm is never told to track them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(
            nn.BatchNorm2d(2, momentum=None), nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, momentum=None, affine=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.norms(x)


@pytest.mark.parametrize("build", [StochasticDepth, Averaged])
@pytest.mark.parametrize("plan", ["sample", "spatial"])
def test_equal_to_one_process(build: type[nn.Module], plan: str) -> None:
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(4, 2, 9, 8, dtype=torch.float64)
    target = torch.rand_like(copy.deepcopy(model)(x))

    def rank(comm: Comm) -> bool:
        return verify(copy.deepcopy(model), nn.MSELoss(), (x, target), plan, comm=comm).passed

    assert all(run_threads(2, rank))


def test_momentum_is_left_as_it_was() -> None:
    model = Averaged()
    graph, _ = capture(model, None, (torch.randn(2, 2, 5, 5),))
    assert [m.momentum for m in model.modules() if isinstance(m, nn.BatchNorm2d)] == [None, None]
    assert all("num_batches_tracked" in node.roles for node in graph.nodes if node.op == "batch_norm")


@dataclass
class Found:
    """An output such as libraries return: some of it is no tensor."""

    features: Tensor
    hidden: Any = None
    stride: int = 1


torch.utils._pytree.register_dataclass(Found)


class Returning(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.conv, self.form = nn.Conv2d(2, 3, 3, 2), form

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        forms = {
            "tuple": (y, None, (x.mean(), "name")),
            "dict": {"out": y, "loss": None, "sizes": list(y.shape)},
            "dataclass": Found(y, None, x.shape[2] // y.shape[2]),
        }
        return forms[self.form]


@pytest.mark.parametrize("form", ["tuple", "dict", "dataclass"])
def test_outputs_keep_what_is_no_tensor(form: str) -> None:
    torch.manual_seed(0)
    model, x = Returning(form).double(), torch.randn(2, 2, 11, 9, dtype=torch.float64)

    def rank(comm: Comm) -> Any:
        step = parallelize(copy.deepcopy(model), batch=(x,), plan="spatial", comm=comm)
        return step.gather(step(*step.scatter(x)))

    for output in run_threads(2, rank):
        expected = model(x)
        assert type(output) is type(expected)
        for mine, other in zip(*map(torch.utils._pytree.tree_leaves, (output, expected)), strict=True):
            assert torch.allclose(mine, other) if isinstance(other, Tensor) else mine == other


class InstallsHooks(nn.Module):
    """As transformers does: on its first pass it hooks a layer, to collect what that returns."""

    installed = False

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.installed:
            self.conv.register_forward_hook(lambda module, args, output: output * 2)
            self.installed = True
        return self.conv(x)


def test_hooks_that_the_forward_pass_installs_are_installed_once() -> None:
    model, x = InstallsHooks(), torch.randn(1, 2, 5, 5)
    graphs = [str(capture(model, None, (x,))[0]) for _ in range(3)]
    assert graphs[0].count("= mul(") == 1 and len(set(graphs)) == 1
    torch.testing.assert_close(model(x), 2 * nn.functional.conv2d(x, model.conv.weight, model.conv.bias, padding=1))
