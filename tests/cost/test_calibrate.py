import os
from pathlib import Path

import pytest
import torch

from halocline.comm.threads import ThreadComm, run_threads
from halocline.cost.calibrate import Calibration, calibrate, keep_times, known_times, measure_calls, save, this_machine
from halocline.cost.local_times import LocalTimes, read_table
from halocline.cost.machine import parse_machine
from halocline.cost.measure import fit_line
from halocline.errors import PlanError
from halocline.planning import Asked, measured_plan
from tests.graphs import Residual, captured, zoo


def test_a_line_is_found_through_times_that_lie_on_it() -> None:
    fit = fit_line([(n, 5e-6 + n * 2e-10) for n in (8, 1024, 1 << 16, 1 << 22)])
    assert fit.fixed_s == pytest.approx(5e-6) and fit.per_byte_s == pytest.approx(2e-10)
    assert fit.residual < 1e-9


def test_ranks_measure_one_machine_together_and_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOCLINE_CACHE", str(tmp_path))
    torch.set_num_threads(1)
    seen: list[str] = []

    def rank_main(comm: ThreadComm) -> Calibration:
        return calibrate(comm, lambda what, done, total: seen.append(what))

    first, second = run_threads(2, rank_main)
    assert first.machine == second.machine
    assert set(first.residuals) == {"messages", "sums"} and "overlap" in seen
    assert parse_machine(first.machine.to_toml(), "text") == first.machine
    save(first, 2)
    assert this_machine(2) == first.machine


def test_a_plan_rests_on_measured_layers_and_each_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALOCLINE_CACHE", str(tmp_path))
    torch.set_num_threads(1)
    graph = captured(Residual, (2, 4, 16, 16))

    def rank_main(comm: ThreadComm) -> int:
        asked: list[int] = []
        measured_plan(
            Asked(graph, 2, this_machine(2)), comm, lambda what, done, total: asked.append(total) if done == 0 else None
        )
        return sum(asked)

    assert run_threads(2, rank_main)[0] > 3
    kept = known_times(2)
    assert all(forward > 0 for forward, _ in kept.values())
    run_threads(2, rank_main)  # may ask for more, but for nothing again: that would give another time
    assert known_times(2).items() >= kept.items()


def test_calls_not_in_the_table_are_modelled_and_told() -> None:
    machine = this_machine(1)
    graph = zoo("mini-mesh", 256, 2)
    times = LocalTimes(machine)
    Asked(graph, 2, machine).found(times)
    assert times.missing and all("->" in key for key in times.missing)
    run = run_threads(1, lambda comm: measure_calls(comm, [], "preserve"))
    assert run == [{}]


def test_an_unwritable_cache_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("HALOCLINE_CACHE", str(blocked / "cache"))
    with pytest.raises(PlanError, match=r"cache .* cannot be written.*HALOCLINE_CACHE"):
        keep_times({"relu": (1.0, 1.0)}, 2)


@pytest.mark.parametrize("text", ["", "[]", '{"local_times_s": {"relu": [1]}}', '{"local_times_s": 3}'])
def test_a_malformed_table_of_times_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(PlanError, match="expected JSON with `local_times_s`"):
        read_table(path)
    assert os.path.exists(path)
