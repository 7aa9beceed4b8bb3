"""`connect`: find out how this process was started, and talk to the others that were started with it."""

import atexit
import importlib.util
import os
import socket
import sys
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from halocline.comm.comm import Comm
from halocline.comm.failure import DEFAULT_TIMEOUT_S, choose_timeout_s
from halocline.comm.single import SingleComm
from halocline.comm.started import TRANSPORT_VARIABLE, Start, find_start
from halocline.errors import CommError

_connected: Comm | None = None


def connect(timeout_s: float | None = None) -> Comm:
    """The `Comm` of this process: alone, or one of the ranks started by `mpiexec`, `srun`, `torchrun` or `launch`.

    An initialised `torch.distributed` is used as it is. `HALOCLINE_TRANSPORT` (`mpi`, `gloo` or `nccl`) decides
    instead of the way of starting. A later call gives the same `Comm`, until that is closed. From here on an
    uncaught exception makes the other ranks fail too. Raises `CommError` where the ranks do not find each other.
    """
    global _connected
    if _connected is None or getattr(_connected, "closed", False):
        _connected = _connect(timeout_s)
        if _connected.size > 1:
            _fail_when_uncaught(_connected)
            if hasattr(sys.stdout, "reconfigure"):
                # Ranks share the output: whole lines, and none held back by a rank that is killed.
                sys.stdout.reconfigure(line_buffering=True)
    return _connected


def _connect(timeout_s: float | None) -> Comm:
    forced = os.environ.get(TRANSPORT_VARIABLE)
    if forced not in (None, "", "auto", "mpi", "gloo", "nccl"):
        raise CommError(f"{TRANSPORT_VARIABLE} is {forced!r}; it may be mpi, gloo, nccl or auto.")
    start = find_start(os.environ)
    if forced == "mpi" or (forced in (None, "", "auto") and not dist.is_initialized() and start.by == "mpiexec"):
        return _connect_mpi(start, timeout_s)
    if not dist.is_initialized():
        if start.size == 1:
            return SingleComm()
        _initialise(start, forced or "auto", timeout_s)
    elif dist.get_world_size() == 1:
        return SingleComm()
    from halocline.comm.torchdist import TorchDistComm

    if forced in ("gloo", "nccl"):
        return TorchDistComm(forced, timeout_s)
    with_nccl = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
    return TorchDistComm("nccl" if with_nccl else "gloo", timeout_s)


def _connect_mpi(start: Start, timeout_s: float | None) -> Comm:
    if importlib.util.find_spec("mpi4py") is None:
        raise CommError(
            f"asked for MPI ({start.size} ranks by {start.by}), but mpi4py is not installed. Install halocline[mpi], "
            f"or set {TRANSPORT_VARIABLE}=gloo."
        )
    from halocline.comm.mpi import MpiComm

    comm = MpiComm(timeout_s=timeout_s)
    if start.by == "mpiexec" and comm.size != start.size:
        raise CommError(
            f"mpiexec started {start.size} ranks, but mpi4py's MPI finds {comm.size}: they belong to two MPI "
            f"installations. Use the mpiexec of the MPI that mpi4py was built for, or HALOCLINE_TRANSPORT=gloo."
        )
    return comm if comm.size > 1 else SingleComm()


def _initialise(start: Start, transport: str, timeout_s: float | None) -> None:
    """Initialise `torch.distributed` for this process; every rank of `start` does so."""
    with_nccl = transport == "nccl" or (transport == "auto" and torch.cuda.is_available() and dist.is_nccl_available())
    if with_nccl and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise CommError(f"{TRANSPORT_VARIABLE} is nccl, but this PyTorch finds no CUDA device or no NCCL. Use gloo.")
    rank, address = start.rank, start.address
    if rank is None or address is None:
        rank, address = _rendezvous_over_mpi()
    if with_nccl:
        torch.cuda.set_device(start.local_rank % torch.cuda.device_count())
    # Ranks may come up long after each other, however little they wait for one another later.
    limit = timedelta(seconds=max(choose_timeout_s(timeout_s), DEFAULT_TIMEOUT_S))
    backend = "cpu:gloo,cuda:nccl" if with_nccl else "gloo"
    try:
        if start.by == "torchrun":
            dist.init_process_group(backend, timeout=limit)
        else:
            dist.init_process_group(
                backend, init_method=f"tcp://{address}", rank=rank, world_size=start.size, timeout=limit
            )
    except (RuntimeError, ValueError) as error:
        raise CommError(
            f"rank {rank} of {start.size} (started by {start.by}): the ranks did not find each other through "
            f"{address}: {error}. Is rank 0 there, and may its host be reached on that port?"
        ) from error
    atexit.register(_destroy)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _rendezvous_over_mpi() -> tuple[int, str]:
    """This rank, and a free port on the host of rank 0, found by MPI for `torch.distributed`."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    address = None
    if world.Get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            address = f"{socket.gethostname()}:{probe.getsockname()[1]}"
    return world.Get_rank(), world.bcast(address)


def _fail_when_uncaught(comm: Comm) -> None:
    """Make an uncaught exception here an error on the other ranks, which would wait for this one."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        previous(kind, error, trace)
        if not getattr(comm, "closed", False):
            comm.fail(f"{kind.__name__}: {error}")

    sys.excepthook = hook
