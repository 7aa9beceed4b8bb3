"""Starting and ending ranks: exit codes, what they get, and that nothing is left behind."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import halocline.comm.launch as launching
from halocline.comm.cores import find_cores, find_quota, share_cores
from halocline.comm.launch import launch
from halocline.errors import CommError

TRANSPORTS = ["gloo", *(["mpi"] if importlib.util.find_spec("mpi4py") is not None else [])]
RANK = "rank = int(os.environ.get('RANK') or os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK'])"


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", f"import os, signal, sys, time; {RANK}\n{code}"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_get_their_surroundings(
    transport: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    names = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "HALOCLINE_RANKS", "HALOCLINE_TRANSPORT", "MALLOC_TRIM_THRESHOLD_"]
    told = f"print('rank', rank, *(os.environ[name] for name in {names}), len(os.sched_getaffinity(0)))"
    assert launch(python(told), 2, transport, verbose=True) == 0
    out, err = capfd.readouterr()
    share = max(1, len(find_cores(2)) // 2)
    threads = max(1, int(min(len(find_cores(2)), find_quota())) // 2)
    pinned = share if "rank 0 on cpus" in err else len(os.sched_getaffinity(0))
    expected = [f"rank {rank} 7 {threads} 2 {transport} {1 << 32} {pinned}" for rank in (0, 1)]
    assert sorted(out.splitlines()) == expected
    assert f"halocline: ranks: 2 over {transport}; threads of each: {threads}" in err


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("code", "expected", "text"),
    [
        ("pass", 0, ""),
        ("sys.exit(7 if rank == 1 else 0)", 7, ""),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(60)", 137, "rank 1 was ended by SIGKILL"),
    ],
    ids=["well", "badly", "killed"],
)
def test_exit_code_of_the_first_bad_end(
    transport: str,
    code: str,
    expected: int,
    text: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launching, "_GRACE_S", 0.3)
    start_s = time.monotonic()
    assert launch(python(code), 2, transport) == expected
    assert time.monotonic() - start_s < 20
    assert text in capfd.readouterr().err


def test_ranks_of_mpi_start_without_waiting_for_torch() -> None:
    if "mpi" not in TRANSPORTS:
        pytest.skip("no mpi4py")
    code = "import sys; from halocline.comm.launch import launch; sys.exit(launch(['true'], 2, 'mpi') or 'torch' in {})"
    assert subprocess.run([sys.executable, "-c", code.format("sys.modules")], check=False).returncode == 0


def test_what_cannot_be_started_is_said(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch(["/no/such/program", "x"], 1, "gloo") == 127
    assert "cannot start `/no/such/program x`: No such file" in capfd.readouterr().err
    with pytest.raises(CommError, match="asked for 0 ranks"):
        launch(["true"], 0)
    with pytest.raises(CommError, match="transport 'carrier pigeon'"):
        launch(["true"], 1, "carrier pigeon")
    monkeypatch.setattr(launching, "_find_mpiexec", lambda: None)
    with pytest.raises(CommError, match="mpi4py or an mpiexec is missing"):
        launch(["true"], 1, "mpi")


@pytest.mark.parametrize(
    ("transport", "number", "code"),
    [
        ("gloo", signal.SIGTERM, 143),
        *((transport, signal.SIGINT, 130) for transport in TRANSPORTS),
        *((transport, signal.SIGKILL, -signal.SIGKILL) for transport in TRANSPORTS),
    ],
)
def test_nothing_is_left_behind(transport: str, number: signal.Signals, code: int, tmp_path: Path) -> None:
    """The launcher is told to end, or killed, while its ranks and a child of one of them would sleep on."""
    asleep = f"""
import subprocess
# Of a killed launcher the ranks end with it; what they have started must look after itself.
child = subprocess.Popen(["sleep", "60"]) if rank == 0 and {number != signal.SIGKILL} else None
with open({str(tmp_path)!r} + f"/{{rank}}", "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid if child else os.getpid()}}")
time.sleep(60)
"""
    program = (
        f"import sys; from halocline.comm.launch import launch; sys.exit(launch({python(asleep)!r}, 2, {transport!r}))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        pids = [pid for rank in (0, 1) for pid in read_when_there(tmp_path / str(rank))]
        launcher.send_signal(number)
        assert launcher.wait(timeout=20) == code
        deadline_s = time.monotonic() + 10
        while time.monotonic() < deadline_s and any(is_running(pid) for pid in pids):
            time.sleep(0.05)
        assert [pid for pid in pids if is_running(pid)] == []
    finally:
        launcher.kill()
        launcher.wait()


def read_when_there(path: Path) -> list[int]:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        if path.exists() and len(path.read_text().split()) == 2:
            return [int(pid) for pid in path.read_text().split()]
        time.sleep(0.05)
    raise AssertionError("the ranks have not started")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_cores_are_shared_out_in_order(tmp_path: Path) -> None:
    assert share_cores([0, 2, 4, 6, 8], 2) == [[0, 2], [4, 6]]
    assert share_cores([0, 1], 3) == []
    assert share_cores([3], 1) == [[3]]
    (tmp_path / "max").write_text("150000 100000\n")
    assert find_quota(tmp_path / "max") == 1.5
    (tmp_path / "max").write_text("max 100000\n")
    assert find_quota(tmp_path / "max") == find_quota(tmp_path / "none") == float("inf")


def test_one_cpu_of_each_core_unless_ranks_need_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for cpu in range(4):  # two cores, two threads each, numbered as Linux does
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    assert find_cores(2, tmp_path) == [0, 1]
    assert find_cores(3, tmp_path) == [0, 1, 2, 3]
    assert find_cores(5, tmp_path) == [0, 1]
