"""MPI and Gloo between real processes: what arrives, and how soon and clearly a failure reaches the others."""

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import halocline.comm.launch as launching
from halocline.comm.launch import launch

WORKER = Path(__file__).parent / "worker.py"
MPI = pytest.param(
    "mpi", marks=pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
)
TRANSPORTS = [MPI, "gloo"]

Run = Callable[[str, str, int], tuple[int, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a scenario of `worker.py` on some ranks: its exit code, and what all of them printed."""
    monkeypatch.setattr(launching, "_GRACE_S", 1.0)
    monkeypatch.setenv("HALOCLINE_PIN", "0")

    def run(scenario: str, transport: str, ranks: int) -> tuple[int, str]:
        code = launch([sys.executable, str(WORKER), scenario], ranks, transport, threads=1)
        out, err = capfd.readouterr()
        return code, out + err

    return run


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_everything_arrives(run: Run, transport: str, ranks: int) -> None:
    code, output = run("everything", transport, ranks)
    assert code == 0, output
    assert all(f"{transport} {rank} of {ranks}: all fine" in output for rank in range(ranks)), output


def test_torch_distributed_of_the_user_is_used_and_left_alone(run: Run) -> None:
    code, output = run("initialised_by_the_user", "gloo", 2)
    assert code == 0, output
    assert all(f"rank {rank}: all fine" in output for rank in (0, 1)), output


@pytest.mark.parametrize(("transport", "ranks"), [pytest.param("mpi", 2, marks=MPI.marks), ("gloo", 3)])
def test_uncaught_exception_reaches_the_others(run: Run, transport: str, ranks: int) -> None:
    code, output = run("raises", transport, ranks)
    assert code != 0
    assert "rank 1 failed: ValueError: no such thing in layer3" in output
    if transport == "gloo":
        for rank in (0, 2):
            assert f"rank {rank} of 3 (gloo): exchange with rank 1: rank 1 failed: ValueError: no such" in output


def test_failure_is_found_by_a_rank_that_waits_for_another(run: Run) -> None:
    """Rank 2 waits for rank 0, which lives and is not late; only the store tells rank 2 of rank 1."""
    code, output = run("fails_while_another_is_awaited", "gloo", 3)
    assert code != 0
    assert "rank 1 found: rank 1 of 3 (gloo)" in output and "this rank can no longer communicate" in output
    assert "rank 2 of 3 (gloo): exchange with rank 0: rank 1 failed: out of memory in layer2" in output
    waited_s = float(output.split("rank 2 found after ")[1].split(" s")[0])
    assert waited_s < 2.5


@pytest.mark.parametrize(
    ("transport", "scenario", "text", "codes"),
    [
        pytest.param("mpi", "is_killed", "rank 1 was ended by SIGKILL", {137}, marks=MPI.marks),
        ("gloo", "is_killed", "exchange with rank 1: a connection is lost, and rank 1 is awaited", {137}),
        pytest.param("mpi", "exits", "rank 1 is awaited, but has ended", {1, 3, 5}, marks=MPI.marks),
        pytest.param("mpi", "is_late", "exchange: rank 1 is late; nothing has come for 1 s", {1, 5}, marks=MPI.marks),
        ("gloo", "is_late", "exchange with rank 1: rank 1 is late; nothing has come for 1 s", {5}),
        pytest.param("mpi", "misses_group", "exchange: rank 1 is late", {1, 5}, marks=MPI.marks),
    ],
)
def test_lost_and_late_ranks_are_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, transport: str, scenario: str, text: str, codes: set[int]
) -> None:
    if scenario == "is_killed":  # only then must the others first find out
        monkeypatch.setattr(launching, "_GRACE_S", 5.0)
    start_s = time.monotonic()
    code, output = run(scenario, transport, 3 if scenario == "misses_group" else 2)
    assert text in output, output
    assert code in codes, output
    assert time.monotonic() - start_s < 40
