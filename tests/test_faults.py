"""A rank that fails, dies or falls behind ends all of them within seconds, and what they say names it and the cause."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.processes import run

TRANSPORTS = ["gloo", *(["mpi"] if importlib.util.find_spec("mpi4py") is not None else [])]
LIMIT_S = 40.0  # starting four ranks on two cores included
FAULTS = {
    "forward": r"rank 1 failed: RuntimeError: spoilt on purpose halocline: rank 1, Compute of conv2d `third`",
    "backward": r"rank 1 failed: RuntimeError: spoilt on purpose halocline: rank 1, Gradient of conv2d `third`",
    "killed": r"rank 1 was ended by SIGKILL",
    "retried": r"rank 1 failed: OutOfMemoryError: tried to allocate too much halocline: rank 1, .* `second`",
    "loader": r"rank 1 failed: OSError: sample 17 cannot be read",
    "late": r"rank 1 is late",
    "leaves": r"rank 1 is awaited, but has ended",
}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_c60_one_rank_fails(fault: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOCLINE_TIMEOUT_S", "3" if fault == "late" else "20")
    ranks = 4 if fault in ("forward", "killed") else 2
    outcome = run(fault, ranks, transport, worker="tests.fault_worker")
    text = " ".join(outcome.text.split())
    assert outcome.code not in (0, None), text
    assert re.search(FAULTS[fault], text), text
    assert "survived" not in text or fault == "leaves", text
    assert outcome.seconds < LIMIT_S, text
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", text)]
    assert len(pids) == ranks and not any(is_running(pid) for pid in pids), text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_c64_memory_does_not_grow(transport: str) -> None:
    outcome = run("steady", 2, transport, worker="tests.fault_worker")
    assert outcome.code == 0, outcome.text
