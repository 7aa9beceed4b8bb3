"""How a process was started, read from its environment."""

import pytest

from halocline.comm.connect import connect
from halocline.comm.failure import choose_timeout_s, name_ranks
from halocline.comm.single import SingleComm
from halocline.comm.started import Start, find_start, first_host
from halocline.errors import CommError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu01", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "20007",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04,7]",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Start("hand", 1)),
        ({"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALRANKID": "2"}, Start("mpiexec", 4, local_rank=2)),
        ({"PMI_SIZE": "1"}, Start("hand", 1)),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMIX_RANK": "1"},
            Start("mpiexec", 2, local_rank=1),
        ),
        (TORCHRUN, Start("torchrun", 4, 3, 1, "gpu01:29500")),
        ({"RANK": "0", "WORLD_SIZE": "4"}, Start("hand", 1)),
        (TORCHRUN | {"PMI_SIZE": "2"}, Start("mpiexec", 2, local_rank=1)),
        (TORCHRUN | {"PMI_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, Start("torchrun", 4, 3, 1, "gpu01:29500")),
        (SRUN, Start("srun", 8, 5, 1, "gpu03:15009")),
        (SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, Start("srun", 8, 5, 1, "a:1")),
        (SRUN | {"PMIX_RANK": "5"}, Start("mpiexec", 8, local_rank=1)),
        (SRUN | {"PMI_SIZE": "8"}, Start("mpiexec", 8, local_rank=1)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, Start("hand", 1)),
    ],
)
def test_start(environment: dict[str, str], expected: Start) -> None:
    assert find_start(environment) == expected


def test_start_with_nonsense_is_refused() -> None:
    with pytest.raises(CommError, match="PMI_SIZE is 'four'"):
        find_start({"PMI_SIZE": "four"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a,b", "a"), ("gpu[03-05,9],cpu1", "gpu03"), ("r1n[7]-ib,x", "r1n7-ib"), ("n[1,2],m", "n1")],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halocline.comm.connect._connected", None)
    comm = connect()
    assert isinstance(comm, SingleComm) and connect() is comm
    monkeypatch.setattr("halocline.comm.connect._connected", None)
    monkeypatch.setenv("HALOCLINE_TRANSPORT", "smoke")
    with pytest.raises(CommError, match="HALOCLINE_TRANSPORT is 'smoke'"):
        connect()


def test_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOCLINE_TIMEOUT_S", "12.5")
    assert choose_timeout_s(None) == 12.5 and choose_timeout_s(3) == 3
    for wrong in ("soon", "-1", "nan"):
        monkeypatch.setenv("HALOCLINE_TIMEOUT_S", wrong)
        with pytest.raises(CommError, match="HALOCLINE_TIMEOUT_S is"):
            choose_timeout_s(None)
    assert name_ranks([2, 1, 2]) == "ranks 1 and 2 are" and name_ranks({4}) == "rank 4 is"
