"""The command line in this process: calls, errors, and what it prints."""

import json
import subprocess
import sys

import pytest
import torch

from halocline.cli.main import COMMANDS, main
from halocline.feed import feed_of
from halocline.models.zoo import ZOO
from halocline.step import parallelize

MINI = ["mini-mesh", "--size", "32", "--width", "0.1", "--batch", "2"]


def call(capsys, *arguments):
    """The exit status of `halocline ARGUMENTS`, and what it printed on stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return (ended.value.code, *capsys.readouterr())


def test_help_lists_the_commands_without_waiting_for_torch():
    code = "import sys, halocline.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    status, out, _ = call(capsys, command, "--help")
    assert status == 0 and out.startswith(f"Usage: halocline {command}")


def test_train_prints_one_json_document(capsys):
    status, out, err = call(capsys, "train", *MINI, "--steps", "5", "--check", "--dtype", "fp64", "--json")
    document = json.loads(out)
    assert status == 0 and "step 5/5" in err
    assert len(document["losses"]) == 5 and document["ranks"] == 1 and document["check"]["passed"]
    assert document["layers"][0]["layer"] == "conv1_1" and document["layers"][0]["ops"][0] == "conv2d"
    assert 0 < document["average_precision"]["end"] < 1


def test_train_shows_layers_progress_and_agreement(capsys):
    status, out, _ = call(capsys, "train", *MINI, "--steps", "12", "--check", "--lr", "1e-2", "--optimizer", "sgd")
    assert status == 0
    for words in (
        "layer",
        "conv3_4",
        "step  1/12  loss",
        "step 12/12  loss",
        "average precision on held-out meshes",
        "loss 0.",
    ):
        assert words in out
    assert out.strip().splitlines()[-1].startswith("agrees with one process at each of 12 steps")


def test_verify_reports(capsys):
    status, out, _ = call(capsys, "verify", *MINI)
    assert status == 0 and "gradient" in out and "equal to one process within 1e-09" in out
    status, out, _ = call(capsys, "verify", *MINI, "--json", "--tolerance", "1e-3")
    document = json.loads(out)
    assert status == 0 and document["passed"] and document["tolerance"] == 1e-3
    assert {deviation["kind"] for deviation in document["deviations"]} == {"loss", "gradient", "buffer"}


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["train"], 2, "Missing argument 'MODEL'"),
        (["trian"], 2, "No such command 'trian'"),
        (["train", "mini-mesh", "--steps", "0"], 2, "--steps"),
        (["train", "mini-mesh", "--optimizer", "lion"], 2, "lion"),
        (["run", "-n", "2", "no_such_script.py"], 2, "no_such_script.py"),
        (["train", "mimi-mesh"], 1, "no model called 'mimi-mesh'. Known are mesh-tangling-1k"),
        (["verify", "mini-mesh", "--size", "33"], 1, "size 33 is not a positive multiple of 8"),
        (["verify", *MINI, "--plan", "diagonal"], 1, "`diagonal` is not a split"),
        (["train", *MINI, "--lr", "1e30", "--optimizer", "sgd", "--steps", "9"], 1, "training diverged"),
        (["train", "own_file.py:net"], 1, "there is no file own_file.py"),
    ],
)
def test_errors_are_one_paragraph(capsys, monkeypatch, arguments, status, text):
    monkeypatch.delenv("HALOCLINE_DEBUG", raising=False)
    got, _, err = call(capsys, *arguments)
    assert got == status and text in err and "Traceback" not in err
    if status == 1:
        told = [line for line in err.splitlines() if not line.startswith("step ")]
        assert len(told) == 1 and told[0].startswith("halocline: ")


def test_debug_shows_the_traceback(capsys, monkeypatch):
    monkeypatch.setenv("HALOCLINE_DEBUG", "1")
    status, _, err = call(capsys, "verify", "mimi-mesh")
    assert status == 1 and "Traceback" in err and "mimi-mesh" in err


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "def bare():\n    return nn.Conv2d(1, 1, 3)\n\n\n"
        "def whole():\n"
        "    return nn.Conv2d(1, 1, 3), nn.MSELoss(), (torch.rand(2, 1, 8, 8), torch.rand(2, 1, 6, 6))\n\n\n"
        "def broken():\n    raise OSError('the disc is gone')\n"
    )
    return path


def test_a_net_from_a_file(capsys, file):
    status, out, _ = call(capsys, "train", f"{file}:whole", "--steps", "3", "--check")
    assert status == 0 and "agrees with one process" in out
    status, _, err = call(capsys, "train", f"{file}:bare")
    assert status == 1 and "let it return (model, loss, batch)" in err
    status, _, err = call(capsys, "verify", f"{file}:broken")
    assert status == 1 and "the disc is gone" in err


def test_plans_from_files(capsys, tmp_path):
    splits = tmp_path / "splits.json"
    splits.write_text('{"conv1_*": "whole"}')
    assert call(capsys, "verify", *MINI, "--plan", str(splits))[0] == 0
    plan = tmp_path / "plan.json"
    feed = feed_of(ZOO["mini-mesh"], 32, 2, 2, torch.float32, 0)
    step = parallelize(ZOO["mini-mesh"].build(32, 0.1), torch.nn.MSELoss(), feed.like())
    plan.write_text(step.plan.to_json())
    assert call(capsys, "train", *MINI, "--plan", str(plan), "--steps", "1")[0] == 0
    plan.write_text(json.dumps({"halocline_plan": 9}))
    status, _, err = call(capsys, "verify", *MINI, "--plan", str(plan))
    assert status == 1 and "plan file" in err
    splits.write_text('{"conv1_*": 3}')
    status, _, err = call(capsys, "verify", *MINI, "--plan", str(splits))
    assert status == 1 and "neither a plan nor a dict" in err
    status, _, err = call(capsys, "verify", *MINI, "--plan", str(tmp_path / "none.json"))
    assert status == 1 and "cannot be read as JSON" in err


def test_a_plan_that_the_planner_wrote_is_used_for_what_it_was_made_for(capsys, tmp_path):
    plan = str(tmp_path / "plan.json")
    assert call(capsys, "plan", *MINI, "--ranks", "1", "--machine", "lassen", "-o", plan)[0] == 0
    for command in (["train", "--steps", "1"], ["verify"]):  # in fp32 and fp64
        assert call(capsys, *command, *MINI, "--plan", plan)[0] == 0
        for other in (["--batch", "3"], ["--size", "64"]):
            status, _, err = call(capsys, *command, *MINI, *other, "--plan", plan)
            assert status == 1 and "plan.json: the plan was made for another model, size or batch" in err
    assert call(capsys, "plan", *MINI, "--ranks", "2", "--machine", "lassen", "-o", plan)[0] == 0
    status, _, err = call(capsys, "verify", *MINI, "--plan", plan)
    assert status == 1 and "made for 2 ranks" in err and "but 1 are to run it" in err
