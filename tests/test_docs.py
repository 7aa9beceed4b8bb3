"""What the documentation says is true: its code runs, and its picture is the one that the code draws."""

import random
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from halocline.comm.threads import run_threads
from halocline.ops.rule import RULES
from halocline.verify import verify
from tests import contract

ROOT = Path(__file__).parent.parent


def run_page(name: str) -> dict:
    """Runs the page's Python blocks one after the other."""
    names: dict = {"__name__": name}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL):
        exec(compile(block, name, "exec"), names)
    return names


def test_concepts():
    assert "results" in run_page("concepts.md")


def test_training():
    names = run_page("training.md")
    assert names["norm"] > 0 and names["loss"].isfinite()


@pytest.fixture(scope="module")
def own_ops():
    """The ops and rules that the page on adding an op makes."""
    before = dict(RULES)
    yield run_page("adding-an-op.md")
    RULES.clear()
    RULES.update(before)


@pytest.mark.parametrize("op", ["mesh::slope", "mesh::share"])
def test_the_rules_of_the_page_keep_the_contract(own_ops, op):
    for seed in range(30):
        contract.run(op, RULES[op], seed)


def test_the_ops_of_the_page_run_inside_a_net(own_ops):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.mesh.share(torch.ops.mesh.slope(self.conv(x)).square() + 1)

    torch.manual_seed(0)
    net, batch = Net().double(), (torch.randn(2, 1, 7, 6).double(), torch.rand(2, 3, 7, 6).double())
    reports = run_threads(4, lambda comm: verify(net, nn.MSELoss(), batch, "h=2,w=2", comm=comm))
    assert all(report.passed for report in reports), str(reports[0])


def test_a_wrong_rule_does_not_keep_the_contract(own_ops):
    class Forgetful(type(RULES["mesh::slope"])):
        def reads(self, node, at):
            (region,) = super().reads(node, at)
            n, c, (start, _), w = region.intervals
            return (type(region)((n, c, (start, max(start, at["h"][1])), w)),)  # not the row below its block

    random.seed(0)
    with pytest.raises(AssertionError, match="repeat with"):
        for seed in range(30):
            contract.run("mesh::slope", _registered("mesh::slope", Forgetful()), seed)


def _registered(op, rule):
    RULES[op] = rule
    return rule


def test_the_picture_is_up_to_date():
    draw = runpy.run_path(str(ROOT / "docs" / "draw_split.py"))["draw"]
    assert draw() == (ROOT / "docs" / "split.svg").read_text(), "run python docs/draw_split.py"


def test_the_readme_shows_the_example_and_files_that_exist():
    readme = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert block in (ROOT / "examples" / "own_loop.py").read_text()
    for link in re.findall(r"\]\(([^)]+)\)", readme):
        assert (ROOT / link).exists(), link
    for file in re.findall(r"`([a-z_/]+\.py)`", readme):
        assert (ROOT / "src/halocline" / file).exists(), file
