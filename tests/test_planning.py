import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from halocline.auto import plan_auto
from halocline.cli.plan import plan_command
from halocline.cli.simulate import simulate_command
from halocline.comm.threads import ThreadComm, run_threads
from halocline.cost.machine import load_machine
from halocline.errors import HaloclineError, PlanError
from halocline.models.zoo import load
from halocline.placement import Plan
from halocline.plan_file import read_plan
from halocline.planning import captured, machine_of, size_of
from halocline.report.explain import as_document, explain
from halocline.search import plan, search
from halocline.step import parallelize
from tests.graphs import zoo

LASSEN = load_machine("lassen")


def test_a_plan_file_is_refused_for_what_it_was_not_made_for(tmp_path: Path) -> None:
    graph = zoo("mini-mesh", 256, 2)
    path = tmp_path / "plan.json"
    made = plan(graph, 4, LASSEN)
    path.write_text(made.to_json())
    assert read_plan(path, graph, 4) == made
    for other, ranks, says in (
        (
            zoo("mini-mesh", 512, 2),
            4,
            "another model, size or batch: for [batch 2 x 18 x 256 x 256, 2 x 1 x 256 x 256;",
        ),
        (zoo("mini-mesh", 256, 1), 4, "another model, size or batch"),
        (graph, 8, "the plan was made for 4 ranks (mesh r0 2 x r1 2), but 8"),
    ):
        with pytest.raises(PlanError, match=re.escape(says)):
            read_plan(path, other, ranks)
    too_far = replace(made, splits={**made.splits, "conv2d": {"z": made.mesh.names}})
    path.write_text(too_far.to_json())
    with pytest.raises(PlanError, match="no index `z`"):
        read_plan(path, graph, 4)
    path.write_text("{}")
    with pytest.raises(PlanError, match="not a halocline plan"):
        read_plan(path, graph, 4)
    with pytest.raises(PlanError, match="cannot be read"):
        read_plan(tmp_path / "nothing.json", graph, 4)


@pytest.mark.parametrize(
    ("entry", "value", "says"),
    [
        ("mesh", 5, "not a halocline plan"),
        ("mesh", [["r0", 0]], "sizes of at least 1"),
        ("splits", [], "not a halocline plan"),
        ("splits", {"conv2d": {"h": "r0"}}, "conv1_1`: index `h` is split over `r`"),
        ("inputs", {"batch_0": {"2": ["zz"]}}, "splits dim 2 of `batch_0` over zz"),
        ("inputs", {"batch_0": {"9": ["r0"]}}, "splits dim 9 of `batch_0`"),
        ("inputs", {"picture": {}}, "it names `picture`, which is not here"),
        ("memory_format", "rows_last", "memory_format is 'rows_last', not one of preserve, channels_last"),
        ("division", 3, "division is 3"),
        ("predicted_seconds", "soon", "predicted_seconds is 'soon', not a number"),
        ("recompute", [["conv2d_99"]], "recomputes `conv2d_99`"),
    ],
)
def test_a_malformed_plan_file_is_refused(tmp_path: Path, entry: str, value: object, says: str) -> None:
    graph = zoo("mini-mesh", 256, 2)
    document = json.loads(plan(graph, 4, LASSEN).to_json())
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**document, entry: value}))
    with pytest.raises(PlanError, match=f"plan.json: .*{re.escape(says)}"):
        read_plan(path, graph, 4)


def test_all_ranks_get_the_plan_of_rank_0_and_it_trains() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 16, 16, dtype=torch.float64), torch.randn(2, 4, 16, 16, dtype=torch.float64)
    graph = zoo("mini-mesh", 256, 2)

    def rank_main(comm: ThreadComm) -> tuple[str, float]:
        machine = LASSEN if comm.rank == 0 else None
        return plan_auto(graph, comm, machine=machine).to_json(), 0.0

    plans = {text for text, _ in run_threads(2, rank_main)}
    assert len(plans) == 1

    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).double()
    whole = nn.functional.mse_loss(model(x), y).item()

    def train(comm: ThreadComm) -> float:
        from halocline.capture import capture

        own, _ = capture(model, nn.MSELoss(), (x, y))
        chosen = plan_auto(own, comm, machine=LASSEN)
        step = parallelize(model, nn.MSELoss(), (x, y), chosen, comm=comm)
        return float(step(*step.scatter(x, y)).item())

    for loss in run_threads(2, train):
        assert loss == pytest.approx(whole, abs=1e-12)


def test_a_plan_that_does_not_fit_is_refused_on_every_rank() -> None:
    graph = zoo("mini-mesh", 256, 2)

    def rank_main(comm: ThreadComm) -> str:
        with pytest.raises(PlanError) as refused:
            plan_auto(graph, comm, machine=LASSEN, memory_bytes=1000)
        return str(refused.value)

    first, second = run_threads(2, rank_main)
    assert first == second and "fits into 1000 bytes a rank" in first


@pytest.mark.parametrize(
    ("text", "nbytes"), [("16GiB", 16 << 30), ("1.5 GB", 1_500_000_000), ("4096", 4096), ("2kib", 2048)]
)
def test_sizes_in_words(text: str, nbytes: int) -> None:
    assert size_of(text) == nbytes


@pytest.mark.parametrize("text", ["", "16 gigs", "-4GiB", "0", "GiB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is not a size of memory"):
        size_of(text)


def test_nets_are_captured_at_any_size_without_memory_for_them() -> None:
    graph = captured(load("mesh-tangling-2k"), None, 64)
    assert [type.shape for type in graph.inputs.values()] == [(64, 18, 2048, 2048), (64, 1, 2048, 2048)]
    assert captured(load("resnet50"), None, 8192).nodes
    with pytest.raises(HaloclineError, match="multiple of 64"):
        captured(load("mesh-tangling-2k"), 100, 1)


def test_an_explanation_adds_up_and_names_what_was_turned_down() -> None:
    found = search(zoo("mini-mesh", 512, 1), 4, LASSEN)
    rows = explain(found)
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    planned = {node.name for v in found.problem.variables for node in v.group.nodes}
    assert sum(row.seconds for row in rows) == pytest.approx(
        sum(node.seconds for node in found.estimate.nodes if node.name in planned)
    )
    assert sum(row.kept_bytes for row in rows) == pytest.approx(found.estimate.memory.kept_bytes, rel=0.05)
    assert any(row.alternatives for row in rows)
    json.dumps(as_document(found))


def test_the_command_plans_prints_json_and_writes_a_plan_that_reads_back(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    words = [
        "mini-mesh",
        "--size",
        "256",
        "--batch",
        "2",
        "--ranks",
        "4",
        "--machine",
        "lassen",
        "--json",
        "-o",
        str(out),
    ]
    result = CliRunner().invoke(plan_command, words, catch_exceptions=False)
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    written = Plan.from_json(out.read_text())
    assert document["seconds"] == written.seconds and document["memory_bytes"] == written.memory_bytes
    assert read_plan(out, captured(load("mini-mesh"), 256, 2), 4) == written


def test_the_command_simulates_strong_and_weak_scaling(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    words = ["mini-mesh", "--size", "512", "--ranks", "1,2,4", "--machine", "dgx-h100", "--json"]
    strong = json.loads(CliRunner().invoke(simulate_command, [*words, "--trace", str(trace)]).stdout)
    assert strong["steps"][0]["speedup"] == 1
    assert json.loads(trace.read_text())["traceEvents"]
    weak = json.loads(CliRunner().invoke(simulate_command, [*words, "--weak"]).stdout)
    assert [step["batch"] for step in weak["steps"]] == [1, 2, 4]
    assert weak["steps"][-1]["speedup"] > strong["steps"][-1]["speedup"]


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (["--machine", "frontier"], PlanError, "this, cpu-cluster, dgx-h100, lassen"),
        (["--machine", "lassen", "--memory", "2 cups"], PlanError, "as in 16GiB"),
        (["--machine", "lassen", "--memory", "1MiB"], PlanError, "Use more ranks"),
        (["--machine", "lassen", "-o", "/nowhere/plan.json"], PlanError, "the plan cannot be written"),
    ],
)
def test_bad_calls_are_errors_that_say_what_to_do(words: list[str], error: type[Exception], says: str) -> None:
    result = CliRunner().invoke(plan_command, ["mini-mesh", "--size", "256", "--ranks", "4", *words])
    assert isinstance(result.exception, error) and says in str(result.exception)


def test_this_is_the_calibrated_machine_or_says_that_it_is_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALOCLINE_CACHE", str(tmp_path))
    assert "quick estimate" in str(machine_of("this", 2).notes["calibrated"])
