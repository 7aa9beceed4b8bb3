"""One rank of the tests with real processes: `python -m tests.process_worker SCENARIO`, started by `processes.run`."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from halocline import step
from halocline.comm.comm import Comm
from halocline.comm.connect import TRANSPORT_VARIABLE, connect
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
            step.capture = captured_once(known, name)
            start_s = time.monotonic()
            report = verify(model, loss, batch, plan, comm=comm)
            assert report.passed, f"{name} {plan} on {comm.size} ranks over {transport}:\n{report}"
            if comm.rank == 0:
                took_s = time.monotonic() - start_s
                print(f"{transport} {name} {plan}: equal within {report.worst.relative:.1e} ({took_s:.1f} s)")
    print(f"rank {comm.rank} of {comm.size}: all equal")


def captured_once(known: dict[str, Any], name: str, capture: Callable[..., Any] = step.capture) -> Callable[..., Any]:
    """`capture`, but only once for the net `name`: a graph is a value."""

    def captured(*arguments: Any) -> Any:
        if name not in known:
            known[name] = capture(*arguments)
        return known[name]

    return captured


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](connect())
