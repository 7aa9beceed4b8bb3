"""One rank of a training run in which something goes wrong: `python -m tests.fault_worker SCENARIO`.

Every rank prints its process id first, and `survived` if it gets to the end.
"""

import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halocline.comm.comm import Comm
from halocline.comm.connect import connect
from halocline.ops import rule_for
from halocline.ops.rule import Rule
from halocline.step import Step, parallelize

CULPRIT = 1


class Net(nn.Module):
    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(3))
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.relu(self.norm(self.second(torch.relu(self.first(x))))))


def prepared(comm: Comm) -> tuple[Step, list[Tensor]]:
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, 16, 12), torch.randn(2, 4, 16, 12)
    step = parallelize(Net(), nn.MSELoss(), (x, y), f"h={comm.size}", comm=comm)
    return step, list(step.scatter(x, y))


def train(step: Step, parts: list[Tensor], steps: int, before: Callable[[int], None] = lambda number: None) -> None:
    optimizer = torch.optim.SGD(step.parameters(), 0.01)
    for number in range(steps):
        before(number)
        optimizer.zero_grad()
        step(*parts).backward()
        optimizer.step()


def spoil(step: Step, layer: str, method: str, error: Exception) -> None:
    """From now on `method` of the rule of `layer` raises, on this rank only."""
    (node,) = (node for node in step.program.graph.nodes if node.origin.module == layer)
    rule = rule_for(node)

    def raising(self: Rule, call: Any, *arguments: Any) -> Any:
        if call.node.origin.module == layer:
            raise error
        return original(self, call, *arguments)

    original = getattr(type(rule), method)
    setattr(type(rule), method, raising)


def forward(comm: Comm) -> None:
    step, parts = prepared(comm)
    if comm.rank == CULPRIT:
        spoil(step, "third", "forward", RuntimeError("spoilt on purpose"))
    train(step, parts, 3)


def backward(comm: Comm) -> None:
    step, parts = prepared(comm)
    if comm.rank == CULPRIT:
        spoil(step, "third", "backward", RuntimeError("spoilt on purpose"))
    train(step, parts, 3)


def killed(comm: Comm) -> None:
    step, parts = prepared(comm)

    def before(number: int) -> None:
        if comm.rank == CULPRIT and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    train(step, parts, 100, before)


def retried(comm: Comm) -> None:
    """One rank runs out of memory, its user catches that and tries again."""
    step, parts = prepared(comm)
    if comm.rank == CULPRIT:
        spoil(step, "second", "forward", torch.OutOfMemoryError("tried to allocate too much"))
        try:
            step(*parts)
        except torch.OutOfMemoryError:
            train(step, parts, 3)
    else:
        train(step, parts, 3)


def loader(comm: Comm) -> None:
    step, parts = prepared(comm)

    def before(number: int) -> None:
        if comm.rank == CULPRIT and number == 1:
            raise OSError("sample 17 cannot be read")

    train(step, parts, 3, before)


def late(comm: Comm) -> None:
    """One rank is busy for longer than the others wait."""
    step, parts = prepared(comm)
    train(step, parts, 3, lambda number: time.sleep(60) if comm.rank == CULPRIT and number == 1 else None)


def leaves(comm: Comm) -> None:
    """One rank ends its loop early, as with a data set that does not divide evenly."""
    step, parts = prepared(comm)
    train(step, parts, 2 if comm.rank == CULPRIT else 4)


def steady(comm: Comm) -> None:
    """300 steps leave the memory of the process and the number of tensors as they were after 50."""
    step, parts = prepared(comm)
    resident_bytes: list[int] = []
    tensors: list[int] = []

    def before(number: int) -> None:
        if number >= 50 and number % 50 == 0:
            gc.collect()
            tensors.append(sum(isinstance(thing, Tensor) for thing in gc.get_objects()))
            pages = int(Path("/proc/self/statm").read_text().split()[1]) if sys.platform == "linux" else 0
            resident_bytes.append(pages * resource.getpagesize())

    train(step, parts, 301, before)
    print(f"rank {comm.rank}: tensors {tensors}, resident bytes {resident_bytes}")
    assert len(set(tensors)) == 1
    assert resident_bytes[-1] - resident_bytes[0] < 5 << 20


if __name__ == "__main__":
    torch.set_num_threads(1)
    here = connect()
    print(f"pid {os.getpid()}", flush=True)
    globals()[sys.argv[1]](here)
    print(f"rank {here.rank} survived")
