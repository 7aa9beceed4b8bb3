"""`launch`: start the ranks of a command on this host, and end them together."""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from halocline.comm import start
from halocline.comm.cores import find_cores, find_quota, share_cores
from halocline.comm.started import OWN_STORE, TRANSPORT_VARIABLE
from halocline.errors import CommError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

# A training step frees and allocates the same large tensors again and again. By default glibc returns each to the
# kernel and every page of it is zeroed and mapped anew: measured, three quarters of the time of a step with 64 MiB
# activations. The price is a larger heap (there, by half).
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Left from whatever started this process; a rank must not believe that it belongs there.
_FOREIGN = ("PMI", "HYDI", "OMPI_", "PRTE_", "MPI_LOCAL", "TORCHELASTIC_")
_FOREIGN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_GRACE_S = 5.0  # for the others to say what they know of a rank that has ended badly
_STOP_S = 5.0  # from the request to end until the end by force
_POLL_S = 0.02


@dataclass(frozen=True)
class Launch:
    """What is started: `commands` (one per rank, or one `mpiexec`), each with additions to the environment."""

    transport: str
    commands: tuple[tuple[list[str], dict[str, str]], ...]
    environment: dict[str, str]
    ranks: int
    threads: int
    cpus: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        pinned = "; ".join(f"rank {rank} on cpus {','.join(map(str, own))}" for rank, own in enumerate(self.cpus))
        return f"ranks: {self.ranks} over {self.transport}; threads of each: {self.threads}; {pinned or 'not pinned'}"


class _Stopped(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


def launch(
    command: list[str], ranks: int, transport: str = "auto", verbose: bool = False, threads: int | None = None
) -> int:
    """Run `command` as `ranks` processes on this host; the exit code: 0, or that of the first rank to end badly.

    `transport` is `mpi`, `gloo`, `nccl`, or `auto`: `HALOCLINE_TRANSPORT`, else MPI if mpi4py and an `mpiexec` are
    installed, else Gloo. Each rank gets `threads` threads (default: an equal share of the cores; `OMP_NUM_THREADS`
    and `MKL_NUM_THREADS` of the user are kept) and is pinned to its share of the cores, unless they are too few or
    `HALOCLINE_PIN=0`. Once one rank has ended badly the others have 5 s to end. SIGINT (exit code 130) and SIGTERM
    (143) end them all, and so does the end of this process, however it comes. Their input is empty; their output
    is this process's. Raises `CommError` if the transport is not there.
    """
    if ranks < 1 or not command:
        raise CommError(f"launch: asked for {ranks} ranks of the command {command}. Give a command and a rank or more.")
    transport, mpiexec = _choose_transport(transport)
    store = None if mpiexec else _open_store()
    with tempfile.TemporaryDirectory(prefix="halocline-") as directory:
        exits = Path(directory) / "exits"
        plan = _plan(command, ranks, exits, transport, mpiexec, store.port if store else 0, threads)
        if verbose:
            print(f"halocline: {plan}", file=sys.stderr, flush=True)
        processes: list[subprocess.Popen[bytes]] = []
        with _signals_raise():
            code = 1
            try:
                for words, additions in plan.commands:
                    environment = plan.environment | additions
                    processes.append(
                        subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
                    )
                code = _watch(processes, exits)
            except _Stopped as stopped:
                code = 128 + stopped.number
            finally:
                if code:
                    _stop(processes)
    return code


def _open_store() -> "TCPStore":
    """Where ranks without MPI find each other, and read which of them failed: here it outlives them all."""
    from torch._C._distributed_c10d import TCPStore  # a second's import, which ranks of MPI need not wait for

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _plan(
    command: list[str],
    ranks: int,
    exits: Path,
    transport: str,
    mpiexec: list[str] | None,
    port: int,
    threads: int | None,
) -> Launch:
    """What to start: through `mpiexec`, or with the store of `torch.distributed` at `port`; bad ends go to `exits`."""
    cores, quota = find_cores(ranks), find_quota()
    if threads is None:
        threads = max(1, int(min(len(cores), quota)) // ranks)
        given = {name: os.environ.get(name, str(threads)) for name in _THREADS}
    else:
        given = dict.fromkeys(_THREADS, str(threads))
    # Under a quota the cores are shared with others, who may sit on the very ones we would choose.
    pin = os.environ.get("HALOCLINE_PIN", "1") != "0" and quota >= len(cores)
    cpus = share_cores(cores, ranks) if pin else []
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
    }
    environment = _ALLOCATOR | environment | given
    environment |= {"HALOCLINE_RANKS": str(ranks), TRANSPORT_VARIABLE: transport}
    pinned = ":".join(",".join(map(str, own)) for own in cpus)
    rank_command = [*_start(signal.SIGKILL), pinned, str(exits), *command]
    commands: list[tuple[list[str], dict[str, str]]]
    if mpiexec is not None:
        commands = [([*_start(signal.SIGTERM), "", "", *mpiexec, "-n", str(ranks), *rank_command], {})]
    else:
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), OWN_STORE: "True"}
        if sys.platform == "linux":
            shared["GLOO_SOCKET_IFNAME"] = environment.get("GLOO_SOCKET_IFNAME", "lo")
        commands = [(rank_command, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
    return Launch(transport, tuple(commands), environment, ranks, threads, tuple(map(tuple, cpus)))


def _choose_transport(transport: str) -> tuple[str, list[str] | None]:
    """The transport to use for `transport`, and the words of `mpiexec` if it is MPI."""
    if transport == "auto":
        transport = os.environ.get(TRANSPORT_VARIABLE) or "auto"
    if transport not in ("auto", "mpi", "gloo", "nccl"):
        raise CommError(f"launch: transport {transport!r}; it may be auto, mpi, gloo or nccl.")
    if transport in ("gloo", "nccl"):
        return transport, None
    mpiexec = _find_mpiexec() if importlib.util.find_spec("mpi4py") is not None else None
    if mpiexec is None and transport == "mpi":
        raise CommError(
            "launch: asked for MPI, but mpi4py or an mpiexec is missing. Install halocline[mpi], or use transport gloo."
        )
    return ("gloo", None) if mpiexec is None else ("mpi", mpiexec)


def _find_mpiexec() -> list[str] | None:
    """`mpiexec` with what makes it start ranks here and leave their cores to us: first the one beside this Python."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        return None
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    if "HYDRA" in version:
        return [found, "-launcher", "fork", "-rmk", "user", "-bind-to", "none"]
    if "Open MPI" in version or "OpenRTE" in version:
        return [found, "--bind-to", "none", "--oversubscribe", *(["--allow-run-as-root"] * (os.getuid() == 0))]
    return [found]


def _start(death_signal: signal.Signals) -> list[str]:
    return [sys.executable, "-I", "-S", str(Path(start.__file__)), str(int(death_signal))]


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Within, SIGINT and SIGTERM raise `_Stopped`. Only the main thread may do this; elsewhere nothing changes."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _watch(processes: list[subprocess.Popen[bytes]], exits: Path) -> int:
    """Wait for all; from the first bad end on only a while. The first bad exit code, or 0."""
    first, deadline_s = 0, float("inf")
    while True:
        codes = [process.poll() for process in processes]
        if not first:
            first = _find_bad_end(exits) or next((code if code > 0 else 128 - code for code in codes if code), 0)
            deadline_s = time.monotonic() + _GRACE_S if first else deadline_s
        if None not in codes or time.monotonic() > deadline_s:
            return first
        time.sleep(_POLL_S)


def _find_bad_end(exits: Path) -> int:
    """The exit code of the first rank that ended badly, or 0. A signal is reported: the rank itself could not."""
    try:
        rank, code = map(int, exits.read_text().splitlines()[0].split())
    except (OSError, IndexError):
        return 0
    if code > 128 and code - 128 in set(signal.Signals):
        how = f"{signal.Signals(code - 128).name}{' (out of memory?)' * (code - 128 == signal.SIGKILL)}"
        print(f"halocline: rank {rank} was ended by {how}; the others cannot go on.", file=sys.stderr, flush=True)
    return code


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End `processes` and what these have started: on request, then by force; at once by force if asked again."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(_Stopped):
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            deadline_s = time.monotonic() + _STOP_S
            while time.monotonic() < deadline_s and any(process.poll() is None for process in processes):
                time.sleep(_POLL_S)
