import json
from dataclasses import replace

import pytest

from halocline.cost.local_times import local_times
from halocline.cost.machine import Machine, load_machine
from halocline.graph import Graph
from halocline.report.trace import trace_document
from halocline.search import search
from halocline.simulate import Simulated, simulate
from tests.graphs import Inception, captured, zoo

LASSEN, CLUSTER = load_machine("lassen"), load_machine("cpu-cluster")


def uncontended(machine: Machine) -> Machine:
    return replace(machine, levels=tuple(replace(level, shared_by=1) for level in machine.levels))


def simulated(graph: Graph, ranks: int, machine: Machine) -> tuple[float, Simulated]:
    found = search(graph, ranks, machine)
    return found.estimate.seconds, simulate(graph, found.plan, machine, local_times(machine, graph))


@pytest.mark.parametrize("machine", [LASSEN, CLUSTER], ids=lambda machine: machine.name)
@pytest.mark.parametrize("net", ["mesh", "unet", "inception", "resnet"])
def test_without_contention_a_step_takes_what_the_planner_says(net: str, machine: Machine) -> None:
    graph = {
        "mesh": lambda: zoo("mini-mesh", 512, 2),
        "unet": lambda: zoo("unet3d", 64, 1),
        "inception": lambda: captured(Inception, (2, 4, 64, 64)),
        "resnet": lambda: zoo("resnet50", 64, 8),
    }[net]()
    estimated, step = simulated(graph, 8, uncontended(machine))
    assert step.seconds == pytest.approx(estimated, rel=0.05)


def test_thousands_of_ranks_are_followed_by_a_few_of_them() -> None:
    estimated, step = simulated(zoo("mesh-tangling-2k", 2048, 4), 2048, uncontended(LASSEN))
    assert step.seconds == pytest.approx(estimated, rel=0.05) and len(step.ranks) < 64


def test_ranks_that_share_a_link_wait_for_each_other() -> None:
    graph = zoo("mesh-tangling-2k", 2048, 4)
    found = search(graph, 256, LASSEN)
    times = local_times(LASSEN, graph)
    alone = simulate(graph, found.plan, uncontended(LASSEN), times)
    together = simulate(graph, found.plan, LASSEN, times)
    assert together.seconds > alone.seconds


def test_no_stream_of_a_rank_does_two_things_at_once() -> None:
    _, step = simulated(zoo("mini-mesh", 512, 1), 4, LASSEN)
    for rank in step.ranks:
        for stream in ("compute", "messages"):
            mine = sorted(
                (e.start_s, e.start_s + e.seconds) for e in step.events if (e.rank, e.stream) == (rank, stream)
            )
            assert mine
            assert all(stop <= start + 1e-12 for (_, stop), (start, _) in zip(mine, mine[1:]))
    assert max(e.start_s + e.seconds for e in step.events) == pytest.approx(step.seconds)


def test_the_trace_is_what_perfetto_reads() -> None:
    _, step = simulated(zoo("mini-mesh", 256, 2), 2, CLUSTER)
    document = json.loads(json.dumps(trace_document(step)))
    complete = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == len(step.events)
    assert {event["pid"] for event in complete} == {0, 1}
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(step.seconds * 1e6)
    assert all({"name", "cat", "tid"} <= event.keys() for event in complete)
