"""The command line with real ranks: it starts them, uses those there are, and ends them all."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
HALOCLINE = [sys.executable, "-m", "halocline.cli.main"]
MINI = ["mini-mesh", "--size", "32", "--width", "0.1", "--batch", "2"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HALOCLINE_TIMEOUT_S": "60"}


def halocline(*arguments, before=()):
    return subprocess.run(
        [*before, *HALOCLINE, *arguments], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )


def test_train_splits_every_sample_over_two_ranks_and_agrees():
    done = halocline(
        "train",
        *MINI,
        "--ranks",
        "2",
        "--plan",
        "spatial",
        "--steps",
        "30",
        "--lr",
        "1e-2",
        "--dtype",
        "fp64",
        "--check",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["ranks"] == 2 and document["check"]["passed"]
    first = document["layers"][0]
    assert first["split"] == "h/2" and first["shape"][2] == 2 * first["part"][2] and first["received_bytes"] > 0
    assert document["losses"][-1] < document["losses"][0]


def test_verify_on_four_ranks():
    done = halocline("verify", "resnet-small", "--ranks", "4", "--plan", "n=2,h=2", "--width", "0.25")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plan n=2,h=2 on 4 ranks" in done.stdout and "equal to one process within 1e-09" in done.stdout


def test_verify_fails_and_names_the_first_layer():
    done = halocline("verify", *MINI, "--ranks", "2", "--plan", "w=2", "--tolerance", "1e-30", "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert not document["passed"] and "1_1" in document["first_difference"]


def test_ranks_that_were_started_already_are_used():
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("no mpiexec beside this Python")
    done = halocline("verify", *MINI, before=[str(mpiexec), "-n", "2"])
    assert done.returncode == 0 and "on 2 ranks (mpi)" in done.stdout, done.stderr
    done = halocline("verify", *MINI, "--ranks", "3", before=[str(mpiexec), "-n", "2"])
    assert done.returncode == 2 and "--ranks 3, but mpiexec started 2 ranks" in done.stderr


@pytest.mark.parametrize(
    ("transport", "arguments", "text"),
    [
        ("mpi", [*MINI, "--plan", "h=3"], "plan `h=3` does not"),
        ("gloo", ["FILE:net"], "rank 1 stopped at loading"),
    ],
)
def test_an_error_is_told_once_and_ends_all_ranks(tmp_path, transport, arguments, text):
    (tmp_path / "own.py").write_text(
        "import os\nfrom torch import nn\n\n\n"
        "def net():\n"
        "    if os.environ['RANK'] == '1':\n        raise OSError('the disc is gone')\n"
        "    return nn.Conv2d(1, 1, 3)\n"
    )
    arguments = [argument.replace("FILE", str(tmp_path / "own.py")) for argument in arguments]
    start_s = time.monotonic()
    done = subprocess.run(
        [*HALOCLINE, "verify", *arguments, "--ranks", "2"],
        cwd=ROOT, env=ENVIRONMENT | {"HALOCLINE_TRANSPORT": transport}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("halocline: ") == 1 and text in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - start_s < 60


def test_ctrl_c_stops_all_ranks():
    process = subprocess.Popen(
        [*HALOCLINE, "train", *MINI, "--ranks", "2", "--steps", "100000"],
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            break
    ranks = [pid for pid in _descendants(process.pid) if pid != process.pid]
    assert len(ranks) >= 2
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err
    assert not [pid for pid in ranks if _alive(pid)]


def _descendants(pid):
    found = [pid]
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += _descendants(int(child))
    return found


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("own_loop.py", "rank 1 of 2 computed rows (48, 96), loss "),
        ("own_parts.py", "rank 1 holds (1, 1, 128, 256) of an output of (1, 1, 256, 256)"),
    ],
)
def test_the_examples_run(script, line):
    done = halocline("run", "-n", "2", str(ROOT / "examples" / script))
    assert done.returncode == 0, done.stderr
    assert line in done.stdout


def test_run_passes_arguments_and_the_exit_status(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:])\nsys.exit(int(sys.argv[2]))\n")
    done = halocline("run", "-n", "2", "--transport", "gloo", str(script), "--ranks", "7")
    assert done.returncode == 7 and done.stdout.count("['--ranks', '7']") == 2


def test_the_example_net_trains():
    done = halocline("train", "examples/own_net.py:edges", "--ranks", "2", "--plan", "h=2", "--steps", "8", "--check")
    assert done.returncode == 0 and "agrees with one process at each of 8 steps" in done.stdout, done.stderr
