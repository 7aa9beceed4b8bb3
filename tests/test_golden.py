"""The printed graph, plan and program of a small net. A refactor leaves them as they are.

After a change that is meant to alter them: `HALOCLINE_GOLDEN=write pytest tests/test_golden.py`, and read the diff.
"""

import copy
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from halocline.capture import capture
from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.placement import Plan
from halocline.step import parallelize

GOLDEN = Path(__file__).parent / "golden"


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(4, 6, 3, stride=2, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    )


BATCH = (torch.zeros(2, 3, 17, 12), torch.zeros(2, dtype=torch.int64))


def printed() -> dict[str, str]:
    """What is printed of the net on 2 ranks, split in space; both ranks print the same."""
    net = small_net()

    def rank(comm: Comm) -> dict[str, str]:
        step = parallelize(copy.deepcopy(net), nn.CrossEntropyLoss(), BATCH, "spatial", comm=comm)
        graph = str(step.program.graph).replace("cudnn_enabled=True", "cudnn_enabled=False")  # as torch was built
        return {"graph": graph, "plan": str(step.plan), "program": str(step.program)}

    one, other = run_threads(2, rank)
    assert one == other
    return one


def test_printed_graph_plan_and_program_are_the_golden_ones() -> None:
    for name, text in printed().items():
        path = GOLDEN / f"{name}.txt"
        if os.environ.get("HALOCLINE_GOLDEN") == "write":
            path.write_text(text + "\n")
        assert text + "\n" == path.read_text(), f"{path.name} differs; {__doc__}"


def test_plan_survives_json() -> None:
    net = small_net()

    def rank(comm: Comm) -> Plan:
        return parallelize(copy.deepcopy(net), nn.CrossEntropyLoss(), BATCH, "h=2", comm=comm).plan

    plan = run_threads(2, rank)[0]
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("mode", [True, False])
def test_capture_is_repeatable(mode: bool) -> None:
    nets = [small_net().train(mode) for _ in range(2)]
    graphs = [str(capture(net, nn.CrossEntropyLoss(), BATCH)[0]) for net in nets]
    assert graphs[0] == graphs[1]
