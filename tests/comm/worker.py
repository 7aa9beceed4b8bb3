"""One rank of the transport tests: `worker.py SCENARIO`, started by `mpiexec` or by `launch`."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from halocline.comm.comm import Comm
from halocline.comm.connect import connect
from halocline.errors import CommError

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count) * 7 + rank).remainder(2 if dtype == torch.bool else 100).to(dtype)


def exchange_round_trips(comm: Comm) -> None:
    """Uneven sizes, two messages per pair in order, every dtype; two exchanges in flight, waited for in reverse."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for dtype in DTYPES:
        started = []
        for scale in (1, 1000):
            sends = [(p, values(comm.rank, scale * (comm.rank + p) + k, dtype)) for p in others for k in (1, 5)]
            recvs = [(p, torch.empty(scale * (comm.rank + p) + k, dtype=dtype)) for p in others for k in (1, 5)]
            started.append((comm.exchange(sends, recvs), recvs))
        for handle, recvs in reversed(started):
            handle.wait()
            handle.wait()
            for peer, tensor in recvs:
                assert torch.equal(tensor, values(peer, tensor.numel(), dtype)), (dtype, peer)


def exchange_with_some(comm: Comm) -> None:
    """No message at all, and messages in one direction between two ranks only."""
    comm.exchange([], []).wait()
    tensor = torch.full((3, 4), float(comm.rank + 1))
    if comm.rank == 0:
        comm.exchange([(1, tensor)], []).wait()
    if comm.rank == 1:
        comm.exchange([], [(0, tensor)]).wait()
        assert tensor.tolist() == [[1.0] * 4] * 3
    parameter = torch.nn.Parameter(torch.zeros(2))
    if comm.rank == 1:
        comm.exchange([(0, parameter)], []).wait()
    if comm.rank == 0:
        comm.exchange([], [(1, parameter)]).wait()


def exchange_large(comm: Comm) -> None:
    """Larger than what any transport buffers: all ranks send before any receives, and one does not come at once."""
    peer, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    found = torch.empty(3_000_001)
    handle = comm.exchange([(peer, values(comm.rank, 3_000_001, torch.float32))], [(source, found)])
    if comm.rank == 0:
        time.sleep(0.3)
    handle.wait()
    assert torch.equal(found, values(source, 3_000_001, torch.float32))


def reductions(comm: Comm) -> None:
    groups = [tuple(range(comm.size)), (comm.rank,)] + [(0, comm.size - 1)] * (comm.rank in (0, comm.size - 1))
    for group in groups:
        for dtype in DTYPES:
            for op in ("sum", "max", "min"):
                if (dtype, op) == (torch.bool, "sum"):
                    continue
                parts = torch.stack([values(rank, 11, dtype) for rank in group])
                tensor = values(comm.rank, 11, dtype)
                comm.all_reduce(tensor, group, op).wait()  # type: ignore[arg-type]
                expected = parts.sum(0).to(dtype) if op == "sum" else getattr(parts, f"a{op}")(0)
                assert torch.equal(tensor, expected), (group, dtype, op, tensor, expected)


def reduction_has_equal_bits(comm: Comm) -> None:
    group = tuple(range(comm.size))
    for count in (1, 1000, 300_000):
        for op in ("sum", "max"):
            tensor = torch.randn(count, generator=torch.Generator().manual_seed(comm.rank))
            if op == "max":
                tensor[comm.rank + 1 :: 5] = float("nan")
                tensor[0] = -0.0 if comm.rank else 0.0
            handle = comm.all_reduce(tensor, group, op)  # type: ignore[arg-type]
            other = torch.full((2,), comm.rank)
            comm.all_reduce(other, group).wait()  # overtakes in the program, not on the wire
            handle.wait()
            assert other.tolist() == [sum(group)] * 2
            found = comm.all_gather_object(tensor.view(torch.int32).numpy().tobytes())
            assert all(bits == found[0] for bits in found), (count, op)
            if op == "max" and count > 1:
                assert tensor[:5].isnan().tolist() == [False, *[True] * comm.size, *[False] * (4 - comm.size)]


def objects(comm: Comm) -> None:
    big = "x" * 100_000 if comm.rank == 0 else None
    assert comm.all_gather_object((comm.rank, big)) == [
        (r, "x" * 100_000 if r == 0 else None) for r in range(comm.size)
    ]


def refusals(comm: Comm) -> None:
    for peer in (comm.rank, comm.size, -1):
        try:
            comm.exchange([(peer, torch.ones(1))], [])
        except CommError as error:
            assert f"rank {comm.rank} of {comm.size} ({comm.name})" in str(error)
        else:
            raise AssertionError(f"peer {peer} was accepted")


def threads_of_groups() -> int:
    if sys.platform != "linux":
        return 0
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("pt_gloo_runloop")


def closing(comm: Comm) -> None:
    """Every thread of its groups has ended then: one that Python's own end meets may abort the process."""
    before = threads_of_groups()
    comm.close()
    comm.close()
    if comm.name == "gloo":
        assert threads_of_groups() <= before // 2  # those of torch's own group remain
        try:
            comm.all_gather_object(None)
        except CommError as error:
            assert "it is closed" in str(error)
        else:
            raise AssertionError("a closed communicator was used")


def everything(comm: Comm) -> None:
    for check in (
        exchange_round_trips,
        exchange_with_some,
        exchange_large,
        reductions,
        reduction_has_equal_bits,
        objects,
        refusals,
        closing,
    ):
        check(comm)
    print(f"{comm.name} {comm.rank} of {comm.size}: all fine")


def step_together(comm: Comm) -> None:
    """As a training step would: every rank needs its neighbour, and then all."""
    data = torch.ones(100)
    comm.exchange([((comm.rank + 1) % comm.size, data)], [((comm.rank - 1) % comm.size, data.clone())]).wait()
    comm.all_reduce(data, tuple(range(comm.size))).wait()


def raises(comm: Comm) -> None:
    """Rank 1 raises, uncaught; the others wait for it."""
    step_together(comm)
    if comm.rank == 1:
        raise ValueError("no such thing in layer3")
    await_message(comm)


def fails_while_another_is_awaited(comm: Comm) -> None:
    """Rank 1 says that it has failed and stays; rank 0 does something else; rank 2 waits for rank 0."""
    step_together(comm)
    if comm.rank == 1:
        comm.fail("out of memory in layer2")
        try:
            step_together(comm)
        except CommError as error:
            print(f"rank 1 found: {error}", flush=True)
    if comm.rank == 2:
        await_message(comm, 0)
    time.sleep(20)


def exits(comm: Comm) -> None:
    """Rank 1 leaves without a word."""
    step_together(comm)
    if comm.rank == 1:
        sys.exit(3)
    await_message(comm)


def is_killed(comm: Comm) -> None:
    step_together(comm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    await_message(comm)


def is_late(comm: Comm) -> None:
    """Rank 1 does something else."""
    step_together(comm)
    comm.timeout_s = 1.0  # type: ignore[attr-defined]
    if comm.rank == 1:
        time.sleep(20)
    await_message(comm)


def initialised_by_the_user() -> None:
    """`torch.distributed` is there already, with work of the user's in it; twice connected and closed."""
    dist.init_process_group()
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    users, theirs = torch.full((3,), 7.0 + rank), torch.empty(3)
    sent = dist.isend(users, peer)
    for attempt in range(2):
        comm = connect()
        exchange_round_trips(comm)
        reductions(comm)
        assert connect() is comm
        if attempt == 0 and rank == 1:
            comm.fail("this concerns the first attempt only")
        time.sleep(0.2)
        comm.close()
    dist.recv(theirs, peer)
    sent.wait()
    assert theirs.tolist() == [7.0 + peer] * 3
    dist.destroy_process_group()
    print(f"rank {rank}: all fine", flush=True)


def misses_group(comm: Comm) -> None:
    """Rank 1 never comes to the first reduction of a new group."""
    step_together(comm)
    comm.timeout_s = 1.0  # type: ignore[attr-defined]
    if comm.rank == 0:
        comm.all_reduce(torch.ones(1), (0, 1)).wait()
    time.sleep(20)


def await_message(comm: Comm, source: int = 1) -> None:
    """Wait for a message that never comes, and fail as a step of training would."""
    start_s = time.monotonic()
    try:
        comm.exchange([], [(source, torch.empty(5))]).wait()
    except CommError as error:
        print(f"rank {comm.rank} found after {time.monotonic() - start_s:.1f} s: {error}", flush=True)
        comm.fail(str(error))
        sys.exit(5)


if __name__ == "__main__":
    scenario = globals()[sys.argv[1]]
    if scenario is initialised_by_the_user:
        scenario()
    else:
        scenario(connect())
