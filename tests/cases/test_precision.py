"""K12: autocast computes in the dtypes of one process, with statistics in fp32; memory formats are kept."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.program import Start
from halocline.step import parallelize


class Block(nn.Sequential):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())


class Blocks(nn.Module):
    """Three blocks; the second one computes in fp32 if asked to."""

    def __init__(self, full: bool) -> None:
        super().__init__()
        self.blocks, self.full = nn.ModuleList([Block(3, 8), Block(8, 8), Block(8, 4)]), full

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 1 and self.full:
                with torch.autocast("cpu", enabled=False):
                    x = block(x.float())
            else:
                x = block(x)
        return x


X, Y, STEPS = torch.randn(2, 3, 32, 32), torch.randn(2, 4, 32, 32), 5


def trained(model: nn.Module, run: Callable[[], Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The parameters, buffers and last loss after a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype == torch.float16)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = run()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
    return {**model.state_dict(), "loss": loss.detach()}


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name].double() - value.double()).norm()) for name, value in exact.items()}


@pytest.mark.parametrize("full", [False, True], ids=["all", "one block without"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c44_autocast(dtype: torch.dtype, full: bool) -> None:
    torch.manual_seed(0)
    model = Blocks(full)
    exact_model, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    if full:  # `.float()` in the model would spoil the reference
        exact_model.full = False
    exact = trained(exact_model, lambda: F.mse_loss(exact_model(X.double()), Y.double()), None)
    alone = error(trained(plain, lambda: F.mse_loss(plain(X), Y), dtype), exact)

    def rank(comm: Comm) -> None:
        mine = copy.deepcopy(model)
        step = parallelize(mine, nn.MSELoss(), comm=comm, plan="h=2")
        step.prepare(X, Y)
        found = error(trained(mine, lambda: step(*step.scatter(X, Y)), dtype), exact)
        total, allowed = sum(found.values()), sum(alone.values())
        assert total <= 2 * allowed, (total, allowed)
        for name, value in mine.state_dict().items():
            assert value.dtype == plain.state_dict()[name].dtype
            assert found[name] <= 2 * alone[name] + 0.02 * float(exact[name].double().norm()), name
        with torch.autocast("cpu", dtype):
            step.scatter(X, Y)
            program, types = step.program, step.program.graph.types
        halos = [types[program.fetches[i.fetch].value].dtype for i in program.forward if isinstance(i, Start)]
        assert halos == [dtype, torch.float32 if full else dtype, dtype]
        assert [node.type.dtype for node in program.graph.nodes if node.op == "mse_loss"] == [torch.float32]

    run_threads(2, rank, timeout_s=120)


class Mixed(nn.Module):
    """Ops that autocast casts in every way it knows: down, up, to the widest, inside a composite, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(4, 4, 2, 2)
        self.norm, self.mix, self.head = nn.GroupNorm(2, 4), nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y = torch.cat([y, self.conv(x).float()], 1)[:, :4] * torch.einsum("nchw,ck->nkhw", y, self.mix)
        y = F.interpolate(self.up(y), scale_factor=0.5, mode="bilinear")
        return self.head(y.mean((2, 3))).softmax(-1).log()


def test_dtypes_are_those_of_one_process() -> None:
    torch.manual_seed(0)
    model, x, y = Mixed(), torch.randn(2, 3, 9, 7), torch.tensor([1, 3])
    plain = copy.deepcopy(model)
    seen: list[torch.dtype] = []
    for module in plain.modules():
        module.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(plain(x), y)
        loss.backward()

    def rank(comm: Comm) -> None:
        mine = copy.deepcopy(model)
        with torch.autocast("cpu", torch.bfloat16):
            step = parallelize(mine, nn.CrossEntropyLoss(), (x, y), "h=2", comm=comm)
            found = step(*step.scatter(x, y))
            nodes = step.program.graph.nodes
        found.backward()
        ops = ("conv2d", "conv_transpose2d", "group_norm", "linear")
        types = [node.type.dtype for node in nodes if node.op in ops]
        assert torch.float32 not in types and found.dtype == loss.dtype
        torch.testing.assert_close(found, loss, rtol=0.02, atol=0.02)
        for (name, p), q in zip(mine.named_parameters(), plain.parameters()):
            assert p.grad is not None and p.grad.dtype == torch.float32
            torch.testing.assert_close(p.grad, q.grad, rtol=0.1, atol=0.02, msg=name)

    run_threads(2, rank)


@pytest.mark.parametrize("plan", ["h=2", "w=2", "h=2,w=2"])
def test_c43_channels_last(plan: str) -> None:
    model = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 12, 10).contiguous(memory_format=torch.channels_last)
    check_format(model, x, plan, torch.channels_last)


def test_c43_channels_last_3d() -> None:
    model = nn.Conv3d(8, 8, 3, padding=1).to(memory_format=torch.channels_last_3d)
    x = torch.randn(2, 8, 6, 7, 5).contiguous(memory_format=torch.channels_last_3d)
    check_format(model, x, "d=2", torch.channels_last_3d)


def check_format(model: nn.Module, x: Tensor, plan: str, format: torch.memory_format) -> None:
    want = model(x)
    assert want.is_contiguous(memory_format=format)

    def rank(comm: Comm) -> None:
        for chosen in ("preserve", "auto"):
            step = parallelize(copy.deepcopy(model), None, [x], plan, comm=comm, memory_format=chosen)
            (part,) = step.scatter(x)
            part.requires_grad_()
            output = step(part)
            assert output.is_contiguous(memory_format=format)
            torch.testing.assert_close(step.gather(output), want, rtol=1e-4, atol=1e-5)
            output.square().sum().backward()
            assert part.grad is not None and part.grad.shape == part.shape

    run_threads(2 if plan.count("=") == 1 else 4, rank)
