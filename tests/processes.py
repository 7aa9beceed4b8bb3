"""Starts ranks as real processes for the tests, and takes what they print."""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAUNCH = """
import sys
from halocline.comm.launch import launch
sys.exit(launch({command}, {ranks}, {transport!r}, threads=1))
"""


@dataclass(frozen=True)
class Outcome:
    """How a group of ranks ended: exit code, stdout and stderr of all of them together, and how long it took."""

    code: int
    text: str
    seconds: float


def run(
    scenario: str, ranks: int, transport: str, timeout_s: float = 120.0, worker: str = "tests.process_worker"
) -> Outcome:
    """Runs a scenario of the module `worker` on `ranks` processes. Raises TimeoutExpired when they hang."""
    command = [sys.executable, "-m", worker, scenario]
    start_s = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", LAUNCH.format(command=command, ranks=ranks, transport=transport)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    return Outcome(ended.returncode, ended.stdout, time.monotonic() - start_s)
