"""One rank of the tests with real processes: `python -m tests.process_worker SCENARIO`, started by `processes.run`."""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import halocline.step
from halocline.comm.comm import Comm
from halocline.comm.connect import connect
from halocline.comm.started import TRANSPORT_VARIABLE
from halocline.errors import SignatureError
from halocline.ops.rule import RULES
from halocline.step import Step, parallelize
from halocline.verify import verify
from tests.nets import NETS, phrase


def networks(comm: Comm) -> None:
    """Verifies every net that the ranks can split, over MPI and then over Gloo, in different plans where it has some.

    In the same processes, because starting them and capturing the nets take most of the time.
    """
    known: dict[str, Any] = {}
    for turn, transport in enumerate(("mpi", "gloo")):
        if comm.name != transport:
            comm.close()
            os.environ[TRANSPORT_VARIABLE] = transport
            comm = connect()
        assert comm.name == transport
        for number, (name, net) in enumerate(NETS.items()):
            model, loss, batch = net.make()
            plans = [plan for plan in net.plans if plan != "sample" or batch[0].shape[0] >= comm.size]
            if not plans or (name == "resnet50" and turn == comm.size % 2):  # large: over one transport each time
                continue
            plan = phrase(plans[(number + comm.size + turn) % len(plans)], comm.size)
            halocline.step.capture = captured_once(known, name)
            start_s = time.monotonic()
            report = verify(model, loss, batch, plan, comm=comm)
            assert report.passed, f"{name} {plan} on {comm.size} ranks over {transport}:\n{report}"
            if comm.rank == 0:
                took_s = time.monotonic() - start_s
                say(f"{transport} {name} {plan}: equal within {report.worst.relative:.1e} ({took_s:.1f} s)")
    say(f"rank {comm.rank} of {comm.size}: all equal")


def say(text: str) -> None:
    """Prints a line in one piece: ranks share the output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def captured_once(
    known: dict[str, Any], name: str, capture: Callable[..., Any] = halocline.step.capture
) -> Callable[..., Any]:
    """`capture`, but only once for the net `name`: a graph is a value."""

    def captured(*arguments: Any) -> Any:
        if name not in known:
            known[name] = capture(*arguments)
        return known[name]

    return captured


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    )


BATCH = (torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64))


def disagreements(comm: Comm) -> None:
    """Rank 1 differs from the others in one thing after the other; then it fails in a layer, which is not caught."""
    odd = comm.rank == 1

    def step_of(model: nn.Module, plan: str = "spatial", batch: tuple[Tensor, ...] = BATCH) -> Step:
        return parallelize(model, nn.CrossEntropyLoss(), batch, plan, comm=comm)

    def weights() -> None:
        model = small()
        with torch.no_grad():
            model[4].bias[2] += float(odd)
        step_of(model)

    def shapes() -> None:
        step_of(small(), batch=(BATCH[0][:, :, odd:], BATCH[1]))

    def dtypes() -> None:
        step_of(small(), batch=(BATCH[0].to(torch.float64 if odd else torch.float32), BATCH[1]))

    def plans() -> None:
        step_of(small(), "sample" if odd else "spatial")

    def later_shapes() -> None:
        step = step_of(small())
        for size in (8, 7 if odd else 8):
            step(*step.scatter(BATCH[0][:, :, :size], BATCH[1])).backward()

    def modes() -> None:
        step = step_of(small()).train(not odd)
        step(*step.scatter(*BATCH))

    for differ in (weights, shapes, dtypes, plans, later_shapes, modes):
        try:
            differ()
        except SignatureError as error:
            say(f"rank {comm.rank}, {differ.__name__}: {error}")
    say(f"rank {comm.rank} goes on")
    fails_in_a_layer(comm)


def fails_in_a_layer(comm: Comm) -> None:
    """In the second step, rank 1 runs out of memory within a layer."""
    step = parallelize(small(), nn.CrossEntropyLoss(), BATCH, comm=comm)
    step(*step.scatter(*BATCH)).backward()
    if comm.rank == 1:

        def exhausted(*_: Any) -> Any:
            raise MemoryError("no 7 GiB left")

        RULES["adaptive_avg_pool2d"].forward_stages = exhausted  # type: ignore[attr-defined]
    step(*step.scatter(*BATCH)).backward()


def is_killed(comm: Comm) -> None:
    """Between two steps, rank 1 is ended by force."""
    step = parallelize(small(), nn.CrossEntropyLoss(), BATCH, comm=comm)
    step(*step.scatter(*BATCH)).backward()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        step(*step.scatter(*BATCH)).backward()


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](connect())
