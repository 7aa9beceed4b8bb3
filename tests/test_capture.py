"""Capture takes modules as they are: their modes, their buffers, their `torch.no_grad`; and does not touch them."""

import copy

import pytest
import torch
from torch import Tensor, nn

from halocline.capture import capture
from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.errors import CaptureError
from halocline.verify import Report, verify

BATCH = (torch.randn(2, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 1]))


class Stateful(nn.Module):
    """Buffers of several kinds, in the shape of the batch's features and of their channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.register_buffer("last", torch.zeros(2, 5, 8, 8))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


class Reassigned(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2, 3))
        return (x + self.last).mean((2, 3)) + self.mean


class ChangedInPlace(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        self.last.mul_(0.5).add_(x.detach())
        self.seen += x.shape[0]
        return (x + self.last).mean((2, 3))


class WithoutGradient(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        with torch.no_grad():
            gate = torch.softmax(x.mean((2, 3)), 1)
            self.mean.add_(x.amax((0, 2, 3)))
            with torch.enable_grad():
                gate = gate * 2
        return (x * gate[:, :, None, None]).mean((2, 3)) + self.mean


class DecoratedWithoutGradient(Stateful):
    @torch.no_grad()
    def gate(self, x: Tensor) -> Tensor:
        return torch.softmax(x.mean((2, 3)), 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return (x * self.gate(x)[:, :, None, None]).mean((2, 3))


class FrozenParameters(Stateful):
    """Parameters that take no gradient and follow a running mean, as the codebook of a vector quantizer does."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Embedding(2, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x) + self.scale[:, None, None]
        before = self.code(torch.tensor([1], device=x.device))
        with torch.no_grad():
            self.mean.data.mul_(0.9).add_(x.mean((0, 2, 3)), alpha=0.1)
            self.code.weight.data.copy_(self.mean / (1 + self.mean.abs()))
            self.scale.mul_(0.5).add_(self.code.weight[0])
        return x.mean((2, 3)) + before + self.code.weight.sum(0)


@pytest.mark.parametrize("plan", ["sample", "spatial"])
@pytest.mark.parametrize(
    "kind", [Reassigned, ChangedInPlace, WithoutGradient, DecoratedWithoutGradient, FrozenParameters]
)
def test_state_and_no_grad_equal_one_process(kind: type[nn.Module], plan: str) -> None:
    torch.manual_seed(0)
    model = kind().double()

    def rank(comm: Comm) -> Report:
        return verify(copy.deepcopy(model), nn.CrossEntropyLoss(), BATCH, plan, comm=comm)

    for report in run_threads(2, rank):
        assert report.passed, str(report)


def test_a_model_that_communicates_itself_is_refused() -> None:
    class Summed(Stateful):
        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x).mean((2, 3))
            torch.distributed.all_reduce(x)
            return x

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(
            CaptureError, match=r"test_capture.py:\d+: torch.distributed.all_reduce.*itself communicates"
        ):
            capture(Summed().double(), nn.CrossEntropyLoss(), BATCH)
    finally:
        torch.distributed.destroy_process_group()


def test_only_parameters_without_gradient_are_changed_in_place() -> None:
    model = FrozenParameters().double()
    graph, _ = capture(model, nn.CrossEntropyLoss(), BATCH)
    changed = {graph.buffers[name] for name in graph.updates}
    assert changed == {"mean", "code.weight", "scale"} and "conv.weight" in graph.parameters.values()
    model.scale.requires_grad_()
    with pytest.raises(CaptureError, match=r"self\.scale\.mul_.* changes .*scale in place, .*that take a gradient"):
        capture(model, nn.CrossEntropyLoss(), BATCH)


def test_modes_of_modules_are_captured_one_by_one_and_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.Dropout(), nn.Dropout())
    model[1].eval()
    model[3].eval()
    graph, _ = capture(model, None, (torch.randn(2, 3, 8, 8),))
    assert [node["training"] for node in graph.nodes if node.op == "batch_norm"] == [False, True]
    assert [node["train"] for node in graph.nodes if node.op == "dropout"] == [False, True]
    assert [module.training for module in model] == [True, False, True, False, True]


def test_capture_leaves_values_and_attributes_alone() -> None:
    model = ChangedInPlace().double()
    before = copy.deepcopy(model.state_dict())
    last = model.last
    capture(model, nn.CrossEntropyLoss(), BATCH)
    assert model.last is last
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("autocast", [False, True])
def test_shapes_on_the_meta_device_are_enough(autocast: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    batch = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    with torch.autocast("cpu", enabled=autocast):
        want, _ = capture(model, nn.CrossEntropyLoss(), batch)
        found, _ = capture(model, nn.CrossEntropyLoss(), [x.to("meta") for x in batch])
    assert str(found) == str(want)
    if not autocast:  # there is none on the meta device
        empty, _ = capture(copy.deepcopy(model).to("meta"), nn.CrossEntropyLoss(), [x.to("meta") for x in batch])
        assert str(empty) == str(want)


def test_failing_capture_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.mean() > 0 else x

    with pytest.raises(CaptureError, match=r"if x\.mean\(\) > 0"):
        capture(Branches(), None, BATCH[:1])
    assert capfd.readouterr().err == ""
