"""One rank of one side of a benchmark: it prepares the step, then runs it as often as it is told.

Started by `race.py` with the side and the workload as JSON; asked for steps over a local connection.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing.connection import Client
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halocline.bench.where import spent
from halocline.bench.workload import Batch, Workload
from halocline.comm.connect import connect
from halocline.step import parallelize

Step = Callable[[], None]
WHERE = -1  # asked for in place of a number of steps: what the time of a step is spent on
PROFILED = 5  # steps, for that


def plain_step(workload: Workload, channels_last: bool) -> tuple[Step, list[Tensor]]:
    """One process, as PyTorch runs it."""
    model, loss, batch = workload.make()
    model, batch = _formatted(model, batch, channels_last)
    x = batch[0].requires_grad_(workload.wants_input_gradient)

    def step() -> None:
        loss(model(x), batch[1]).backward()

    return step, [x, *model.parameters()]


def split_step(workload: Workload, plan: str) -> tuple[Step, list[Tensor], Callable[[], Mapping[str, float]]]:
    """Every sample split over the ranks."""
    model, loss, batch = workload.make()
    parallel = parallelize(model, loss, batch, plan)
    x, *rest = parallel.scatter(*batch)
    x.requires_grad_(workload.wants_input_gradient)

    def step() -> None:
        parallel(x, *rest).backward()

    def where() -> Mapping[str, float]:
        return spent(parallel.runner, step, PROFILED)

    return step, [x, *model.parameters()], where


def ddp_step(workload: Workload, channels_last: bool) -> tuple[Step, list[Tensor]]:
    """DistributedDataParallel: whole samples divided over the ranks, batch norm over each rank's own."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo")
    model, loss, batch = workload.make()
    model, batch = _formatted(model, tuple(x.chunk(ranks)[rank] for x in batch), channels_last)
    replica = DistributedDataParallel(model)

    def step() -> None:
        loss(replica(batch[0]), batch[1]).backward()

    return step, list(model.parameters())


def _formatted(model: nn.Module, batch: Batch, channels_last: bool) -> tuple[nn.Module, Batch]:
    if not channels_last:
        return model, batch
    kind: Any = torch.channels_last if batch[0].dim() == 4 else torch.channels_last_3d
    model.to(memory_format=kind)  # type: ignore[call-overload]
    return model, (batch[0].contiguous(memory_format=kind), *batch[1:])


def main() -> None:
    side = json.loads(sys.argv[1])
    torch.set_num_threads(side["threads"])
    workload = Workload(**side["workload"])
    rank = connect().rank if side["kind"] == "halocline" else int(os.environ.get("RANK", "0"))
    if side["kind"] in ("jax", "shardtensor"):  # what their packages take is not the step's memory
        import_module(f"halocline.bench.{side['kind']}_side")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    where: Callable[[], Mapping[str, float]] = dict
    if side["kind"] == "halocline":
        step, leaves, where = split_step(workload, side["plan"])
    elif side["kind"] == "ddp":
        step, leaves = ddp_step(workload, side["channels_last"])
    elif side["kind"] == "jax":
        from halocline.bench.jax_side import jax_step

        step, leaves = jax_step(workload), []
    elif side["kind"] == "shardtensor":
        from halocline.bench.shardtensor_side import shardtensor_step

        step, leaves = shardtensor_step(workload)
    else:
        step, leaves = plain_step(workload, side["channels_last"])
    with Client(side["address"], authkey=bytes.fromhex(side["key"])) as driver:
        driver.send((side["name"], rank))
        while count := driver.recv():
            if count == WHERE:
                driver.send(where())
                continue
            seconds = []
            for _ in range(count):
                for leaf in leaves:
                    leaf.grad = None
                start = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - start)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            driver.send((seconds, (peak - before) * 1024))
    if side["kind"] == "ddp":  # left to the end of Python, its threads may abort the process
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
