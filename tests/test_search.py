import itertools
import random
import re

import numpy as np
import pytest

from halocline.budget import Tight, cheapest_within
from halocline.cost.estimate import estimate
from halocline.cost.local_times import LocalTimes
from halocline.cost.machine import Machine, load_machine
from halocline.elimination import TooWide, minimise
from halocline.errors import PlanError
from halocline.paper_search import paper_choice
from halocline.placement import Placement, Plan
from halocline.search import Found, plan, search
from tests.graphs import Dense, Inception, Residual, captured, zoo

LASSEN, CLUSTER = load_machine("lassen"), load_machine("cpu-cluster")
Tables = tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]


def random_dag(rng: np.random.Generator, most: int = 6) -> Tables:
    count = int(rng.integers(1, most + 1))
    sizes = rng.integers(1, 5, count)
    unary = [rng.random(size) for size in sizes]
    edges = [pair for pair in itertools.combinations(range(count), 2) if rng.random() < 0.5]
    return unary, {(a, b): rng.random((sizes[a], sizes[b])) for a, b in edges}


def total(unary: list[np.ndarray], pairs: dict[tuple[int, int], np.ndarray], chosen: tuple[int, ...]) -> float:
    return sum(t[i] for t, i in zip(unary, chosen)) + sum(t[chosen[a], chosen[b]] for (a, b), t in pairs.items())


def every(unary: list[np.ndarray]) -> itertools.product:
    return itertools.product(*(range(len(table)) for table in unary))


@pytest.mark.parametrize("seed", range(60))
def test_elimination_finds_the_minimum_of_random_dags(seed: int) -> None:
    unary, pairs = random_dag(np.random.default_rng(seed))
    value, chosen = minimise(unary, pairs)
    best = min(total(unary, pairs, choice) for choice in every(unary))
    assert value == pytest.approx(best) and total(unary, pairs, chosen) == pytest.approx(best)
    by_paper = paper_choice(unary, pairs)
    assert total(unary, pairs, by_paper) >= best - 1e-12


@pytest.mark.parametrize("seed", range(10))
def test_the_papers_path_is_exact_on_chains(seed: int) -> None:
    rng = np.random.default_rng(seed)
    unary = [rng.random(4) for _ in range(7)]
    pairs = {(i, i + 1): rng.random((4, 4)) for i in range(6)}
    assert paper_choice(unary, pairs) == minimise(unary, pairs)[1]


def test_a_graph_without_a_narrow_order_is_said_to_be_too_wide() -> None:
    unary = [np.zeros(30)] * 8
    with pytest.raises(TooWide):
        minimise(unary, {pair: np.zeros((30, 30)) for pair in itertools.combinations(range(8), 2)}, 1e6)


@pytest.mark.parametrize("seed", range(40))
def test_a_budget_is_kept_and_the_bound_holds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    unary, pairs = random_dag(rng)
    sizes = [rng.integers(0, 20, len(table)).astype(float) for table in unary]
    pair_sizes = {key: rng.integers(0, 5, table.shape).astype(float) for key, table in pairs.items()}
    least = min(total(sizes, pair_sizes, choice) for choice in every(unary))
    for budget in (least - 1, least, least * 1.1 + 1, least * 1.5 + 2):
        within = cheapest_within(Tight(unary, pairs, sizes, pair_sizes, budget))
        feasible = [
            total(unary, pairs, choice) for choice in every(unary) if total(sizes, pair_sizes, choice) <= budget
        ]
        if not feasible:
            assert within is None
            continue
        assert within is not None and total(sizes, pair_sizes, within.chosen) <= budget
        assert within.seconds == pytest.approx(total(unary, pairs, within.chosen))
        assert within.bound_s <= min(feasible) + 1e-9
        assert min(feasible) - 1e-9 <= within.seconds
        if within.seconds <= within.bound_s * (1 + 1e-9):
            assert within.seconds == pytest.approx(min(feasible))
        assert within.seconds <= 1.25 * min(feasible)


def splits(found: Found) -> dict[str, dict[str, int]]:
    """The module of each group's leader and its parts."""
    mesh = found.problem.mesh
    return {
        v.group.leader.origin.module: {name: mesh.parts(axes) for name, axes in v.splits[i].items() if axes}
        for v, i in zip(found.problem.variables, found.chosen)
    }


@pytest.mark.parametrize("machine", [LASSEN, CLUSTER], ids=lambda machine: machine.name)
def test_no_plan_of_a_small_net_is_better_than_the_one_found(machine: Machine) -> None:
    graph = captured(Residual, (2, 4, 64, 64))
    found = search(graph, 2, machine)
    problem = search(graph, 2, machine, method="paper").problem  # with all candidates
    times = LocalTimes(machine)
    costs = [
        estimate(graph, problem.plan(choice, ""), machine, times).seconds
        for choice in itertools.product(*(range(len(v.splits)) for v in problem.variables))
    ]
    assert len(costs) > 50
    assert found.estimate.seconds <= min(costs) * 1.001
    assert found.bound_s is not None and found.bound_s <= min(costs) * (1 + 1e-9)


@pytest.mark.parametrize("ranks", [4, 6])
@pytest.mark.parametrize("net", ["unet", "resnet", "dense", "inception", "mesh"])
def test_exact_never_costs_more_than_the_paper(net: str, ranks: int) -> None:
    nets = {
        "unet": lambda: zoo("unet2d", 64, 2),
        "resnet": lambda: zoo("resnet50", 64, 8),
        "dense": lambda: captured(Dense, (2, 4, 64, 64)),
        "inception": lambda: captured(Inception, (2, 4, 64, 64)),
        "mesh": lambda: zoo("mini-mesh", 256, 2),
    }
    graph = nets[net]()
    exact, paper = (search(graph, ranks, LASSEN, method=method) for method in ("exact", "paper"))
    assert exact.estimate.seconds <= paper.estimate.seconds * (1 + 1e-12)
    assert exact.bound_s is not None and exact.bound_s <= exact.estimate.seconds
    Placement(graph, exact.plan)  # can be run


def test_the_additive_tables_are_the_estimate_of_the_plan() -> None:
    for graph, ranks in ((zoo("mini-mesh", 256, 2), 8), (zoo("unet3d", 32, 1), 8), (zoo("resnet50", 64, 8), 4)):
        found = search(graph, ranks, CLUSTER)
        listed = {node.name for v in found.problem.variables for node in v.group.nodes}
        steps = sum(node.seconds for node in found.estimate.nodes if node.name in listed)
        packed = found.estimate.exposed_sums_s  # holds the packing of gradients, which the tables count with the nodes
        assert 0.99 * steps <= found.problem.cost(found.chosen) <= 1.01 * steps + packed
        assert found.problem.kept(found.chosen) == pytest.approx(found.estimate.memory.kept_bytes, rel=0.05)


def test_equal_inputs_give_equal_plans() -> None:
    graph = zoo("unet3d", 32, 1)
    plans = {plan(graph, 8, LASSEN).to_json() for _ in range(3)}
    assert len(plans) == 1
    assert Plan.from_json(plans.pop()) == plan(graph, 8, LASSEN)


def test_a_mesh_too_large_for_the_memory_is_split_further_than_samples_go() -> None:
    graph = zoo("mesh-tangling-2k", 2048, 4)
    with pytest.raises(PlanError, match=re.escape("the leanest takes 5.")) as refused:
        plan(graph, 4, LASSEN, 5 << 30)
    assert "bn1_1" in str(refused.value) and "ranks would do" in str(refused.value)
    found = search(graph, 8, LASSEN, 5 << 30)
    assert splits(found)["conv1_1"]["n"] == 4 and splits(found)["conv1_1"]["h"] == 2
    assert found.estimate.memory.total_bytes <= 5 << 30


def test_more_ranks_a_sample_make_the_1k_net_faster() -> None:
    graph = zoo("mesh-tangling-1k", 1024, 1)
    times = [plan(graph, ranks, LASSEN).seconds or 0.0 for ranks in (1, 2, 4, 8, 16)]
    speedups = [times[0] / time for time in times]
    assert speedups == sorted(speedups) and 8 < speedups[-1] < 16


def test_a_unet_under_tight_memory_is_spatial_at_the_top_and_gathered_at_the_bottom() -> None:
    graph = zoo("unet3d", 64, 1)
    limit = 52 << 20  # an eighth of what one rank would need
    with pytest.raises(PlanError, match="Use more ranks"):
        search(graph, 2, LASSEN, limit)
    tight = search(graph, 8, LASSEN, limit)
    assert tight.estimate.memory.total_bytes <= limit
    chosen = splits(tight)

    def ranks(module: str) -> int:
        return int(np.prod(list(chosen[module].values()) or [1]))

    assert set(chosen["down.0.0"]) <= {"d", "h", "w"} and ranks("down.0.0") == 8
    assert ranks("bottom.0") < 8 and ranks("up.0.0") == 8


def test_a_slow_interconnect_gets_another_plan_than_a_fast_one() -> None:
    graph = zoo("unet2d", 256, 4)
    fast = search(graph, 16, load_machine("dgx-h100"))
    slow = search(graph, 16, CLUSTER)
    assert splits(fast) != splits(slow)


@pytest.mark.parametrize(
    ("ranks", "memory", "method", "says"),
    [
        (4, 0, "exact", "memory limit 0 bytes"),
        (4, -5, "exact", "memory limit -5 bytes"),
        (4, None, "fast", "method `fast` is not known; there are exact, paper"),
    ],
)
def test_what_makes_no_sense_is_refused(ranks: int, memory: int | None, method: str, says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        plan(zoo("mini-mesh", 256, 2), ranks, LASSEN, memory, method)


def test_thousands_of_ranks_are_planned_in_seconds() -> None:
    import time

    graph = zoo("resnet50", 224, 8192)
    start = time.process_time()
    found = search(graph, 4096, LASSEN)
    assert time.process_time() - start < 5
    assert splits(found)["conv1"] == {"n": 4096}


def test_candidates_are_every_division_of_the_ranks_that_leaves_no_part_empty() -> None:
    from halocline.candidates import candidates

    rng = random.Random(1)
    for _ in range(20):
        mesh = LASSEN.mesh(rng.choice((4, 6, 12, 16)))
        sizes = {"n": rng.randint(1, 5), "h": rng.randint(1, 9), "w": rng.randint(1, 9)}
        found = {tuple(mesh.parts(split.get(name, ())) for name in sizes) for split in candidates(mesh, sizes)}
        divisors = [p for p in range(1, mesh.size + 1) if mesh.size % p == 0]
        wanted = {
            parts
            for parts in itertools.product(divisors, repeat=3)
            if mesh.size % int(np.prod(parts)) == 0 and all(p <= s for p, s in zip(parts, sizes.values()))
        }
        assert found == wanted
