"""How this process was started: what the variables of `launch`, `mpiexec`, `torchrun` and `srun` say."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from halocline.errors import CommError

TRANSPORT_VARIABLE = "HALOCLINE_TRANSPORT"
# What torchrun sets, and `launch` too: the store of `torch.distributed` is theirs, not in the process of rank 0.
OWN_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # MPICH and its kin, Open MPI, MVAPICH


@dataclass(frozen=True)
class Start:
    """How this process was started: `by` whom, with how many ranks, and what `torch.distributed` needs to know.

    `rank` and `address` (`host:port` of rank 0) are None where only MPI itself can tell.
    """

    by: str  # "mpiexec", "torchrun", "srun" or "hand"
    size: int
    rank: int | None = None
    local_rank: int = 0
    address: str | None = None


def find_start(environment: Mapping[str, str]) -> Start:
    """What the variables of `torchrun`, `mpiexec` or `srun` in `environment` say. Raises `CommError` if they clash."""
    torchrun = _find_torchrun(environment)
    # torchrun may itself have been started by mpiexec or srun, once per host; then it knows better than they.
    if torchrun is not None and "TORCHELASTIC_RUN_ID" in environment:
        return torchrun
    for name in _MPI_SIZES:
        if _number(environment, name, 1) > 1:
            return Start("mpiexec", _number(environment, name, 1), local_rank=_find_local_rank(environment))
    if torchrun is not None:
        return torchrun
    # Not SLURM_NTASKS: a batch script has it too, and runs once.
    size = _number(environment, "SLURM_STEP_NUM_TASKS", 1)
    if size > 1 and "PMIX_RANK" in environment:
        return Start("mpiexec", size, local_rank=_find_local_rank(environment))
    if size > 1 and "SLURM_PROCID" in environment:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "localhost")
        port = 15000 + (_number(environment, "SLURM_JOB_ID", 0) + _number(environment, "SLURM_STEP_ID", 0)) % 20000
        host, port_text = environment.get("MASTER_ADDR", first_host(nodes)), environment.get("MASTER_PORT", str(port))
        rank = _number(environment, "SLURM_PROCID", 0)
        return Start("srun", size, rank, _find_local_rank(environment), f"{host}:{port_text}")
    return Start("hand", 1)


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu03` of `gpu[03-05,9],cpu1`."""
    found = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?([^\[,]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes


def _find_torchrun(environment: Mapping[str, str]) -> Start | None:
    if not all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    return Start(
        "torchrun",
        _number(environment, "WORLD_SIZE", 1),
        _number(environment, "RANK", 0),
        _find_local_rank(environment),
        f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}",
    )


def _find_local_rank(environment: Mapping[str, str]) -> int:
    for name in ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        if name in environment:
            return _number(environment, name, 0)
    return 0


def _number(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    value = environment.get(name)
    if value is None:
        return otherwise
    try:
        return int(value)
    except ValueError:
        raise CommError(f"the environment variable {name} is {value!r}, not a number.") from None
