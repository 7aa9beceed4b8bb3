"""A net split over ranks against the plain module in one process: outputs, every gradient, every buffer."""

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import halocline.step
from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.region import Region
from halocline.step import PlanSpec, Step, parallelize

TOLERANCES = {torch.float64: (1e-9, 1e-11), torch.float32: (1e-4, 1e-5)}  # relative, absolute
Batch = Sequence[Tensor]


@dataclass(frozen=True)
class Passed:
    """What one process gets out of a net: outputs and gradients of its inputs in the last step, and its state after."""

    outputs: list[Tensor]
    input_grads: list[Tensor | None]
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


class Counting:
    """A `Comm` that counts the numbers it exchanges and reduces."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.exchanged, self.reduced = comm, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def exchange(self, sends: Any, recvs: Any) -> Any:
        self.exchanged += sum(tensor.numel() for _, tensor in (*sends, *recvs))
        return self.comm.exchange(sends, recvs)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...], op: Any = "sum") -> Any:
        self.reduced += tensor.numel()
        return self.comm.all_reduce(tensor, group, op)


def ranks_of(plan: PlanSpec) -> int:
    """How many ranks a phrase such as `h=2,w=2` is for."""
    return math.prod(int(number) for number in re.findall(r"=(\d+)", str(plan)))


def as_dtype(batch: Batch, dtype: torch.dtype) -> list[Tensor]:
    return [x.to(dtype) if x.is_floating_point() else x for x in batch]


def random_like(outputs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Cotangents: never all ones, which hide borders in the wrong place."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs]


def one_process(model: nn.Module, batch: Batch, steps: int = 1) -> Passed:
    """`steps` forward and backward passes of the module itself, whose gradients add up."""
    for number in range(steps):
        inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in batch]
        outputs = pytree.tree_leaves(model(*inputs))
        pairs = [(x, c) for x, c in zip(outputs, random_like(outputs, number)) if x.requires_grad]
        torch.autograd.backward([x for x, _ in pairs], [c for _, c in pairs])
    grads = {name: p.grad for name, p in model.named_parameters()}
    return Passed([x.detach() for x in outputs], [x.grad for x in inputs], grads, dict(model.named_buffers()))


def cut(whole: Tensor, region: Region) -> Tensor:
    return whole[tuple(slice(*interval) for interval in region.intervals)]


def split_backward(step: Step, output: object, seed: int) -> None:
    """The backward pass of a step without a loss, from random cotangents of the whole output."""
    outputs = pytree.tree_leaves(output)
    layouts, names = step.program.placement.layouts, step.program.graph.outputs
    wholes = random_like([torch.empty(layouts[name].shape, dtype=x.dtype) for name, x in zip(names, outputs)], seed)
    parts = [cut(c, layouts[name].region(step.comm.rank)) for c, name in zip(wholes, names)]
    pairs = [(x, c) for x, c in zip(outputs, parts) if x.requires_grad]
    torch.autograd.backward([x for x, _ in pairs], [c for _, c in pairs])


def split(step: Step, batch: Batch, steps: int = 1) -> tuple[Passed, list[Region]]:
    """What one rank gets: its part of the inputs' gradients (with the regions), everything else whole."""
    for number in range(steps):
        parts = [x.clone().requires_grad_(x.is_floating_point()) for x in step.scatter(*batch)]
        output = step(*parts)
        split_backward(step, output, number)
    grads = {name: p.grad for name, p in step.model.named_parameters()}
    buffers = dict(step.model.named_buffers())
    return Passed(pytree.tree_leaves(step.gather(output)), [x.grad for x in parts], grads, buffers), list(step.regions)


@contextmanager
def captured_once(capture: Callable[..., Any] = halocline.step.capture) -> Iterator[None]:
    """Within, ranks and plans share the graph of a net for each of its modes: a graph is a value, capturing it slow."""
    known: dict[Any, Any] = {}

    def shared(model: nn.Module, loss: Any, batch: Batch) -> Any:
        key = tuple(m.training for m in model.modules()), tuple((x.shape, x.dtype) for x in batch)
        if key not in known:
            known[key] = capture(model, loss, batch)
        return known[key]

    halocline.step.capture = shared
    try:
        yield
    finally:
        halocline.step.capture = capture


def assert_same(what: str, got: Tensor | None, want: Tensor | None, exactly: bool = False) -> None:
    """Equal within the tolerance of the dtype. A gradient that does not exist counts as zero."""
    if want is None and got is None:
        return
    assert got is not None or want is None or not want.count_nonzero(), f"{what}: there is none"
    if got is None or want is None:
        assert got is None or not got.count_nonzero(), f"{what}: one process has none"
        return
    rtol, atol = TOLERANCES.get(want.dtype, (0.0, 0.0))
    if want.dtype == torch.float32:  # sums of many terms, in another order: relative to the largest
        atol *= max(1.0, float(want.abs().max()))
    if exactly:
        rtol = atol = 0.0
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def assert_equal_to_one_process(
    build: Callable[[], nn.Module],
    batch: Batch,
    *plans: str | tuple[int, Mapping[str, str]],
    dtype: torch.dtype = torch.float64,
    exactly: bool = False,
    steps: int = 1,
    shape: tuple[int, ...] | None = None,
    look: Callable[[Step, Passed], None] = lambda step, passed: None,
) -> None:
    """Every plan (a phrase that names its ranks, or ranks and a dict) gives what the plain module gives.

    `exactly`: outputs are bit-equal. `shape` is that of the first output, `look` is called on every rank afterwards.
    """
    torch.manual_seed(0)
    model = build().to(dtype)
    batch = as_dtype(batch, dtype)
    want = one_process(copy.deepcopy(model), batch, steps)
    assert shape is None or want.outputs[0].shape == shape
    # The first plan in two ways: parts as even as possible, and as `torch.chunk` cuts them.
    for plan, division in (*((plan, "balanced") for plan in plans), (plans[0], "chunk")):
        ranks, spec = (ranks_of(plan), plan) if isinstance(plan, str) else plan

        def rank(comm: Comm, spec: PlanSpec = spec, division: Any = division) -> None:
            step = parallelize(
                copy.deepcopy(model), None, batch, spec, comm=comm, memory_format="preserve", division=division
            )
            got, regions = split(step, batch, steps)
            for number, (mine, whole) in enumerate(zip(got.outputs, want.outputs, strict=True)):
                assert_same(f"{spec}: output {number}", mine, whole, exactly)
            for number, (mine, whole) in enumerate(zip(got.input_grads, want.input_grads, strict=True)):
                part = None if whole is None else cut(whole, regions[number])
                assert_same(f"{spec}: gradient of input {number}", mine, part)
            for name, grad in want.grads.items():
                assert_same(f"{spec}: gradient of {name}", got.grads[name], grad)
            for name, buffer in want.buffers.items():
                assert_same(f"{spec}: buffer {name}", got.buffers[name], buffer)
            look(step, got)

        with captured_once(), torch.random.fork_rng():
            run_threads(ranks, rank, timeout_s=60)
