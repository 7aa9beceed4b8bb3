import random
from dataclasses import replace

import numpy as np
import pytest

from halocline.byhand import plan_by_hand
from halocline.cost.machine import load_machine
from halocline.cost.movement import received, returned
from halocline.cost.pairs import Owners, pair_costs
from halocline.cost.sampled import Sampled, even_split
from halocline.layout import Layout
from halocline.mesh import Mesh, prime_mesh
from halocline.placement import Placement
from halocline.region import Region
from halocline.transfer import Transfer
from tests.graphs import zoo

LASSEN = load_machine("lassen")
MACHINE = replace(LASSEN, local=replace(LASSEN.local, fetch_s=1e-4))


def layouts(rng: random.Random, mesh: Mesh, shape: tuple[int, ...], count: int) -> list[Layout]:
    found = []
    for _ in range(count):
        axes: list[list[str]] = [[] for _ in range(len(shape) + 1)]
        for name in mesh.names:
            axes[rng.randrange(len(shape) + 1)].append(name)
        found.append(Layout(mesh, tuple(even_split(tuple(a), mesh.parts(tuple(a)), s) for a, s in zip(axes, shape))))
    return found


def haloed(rng: random.Random, layout: Layout) -> tuple[Region, ...]:
    halo = [rng.choice((0, 0, 1, 3)) for _ in layout.shape]
    return tuple(
        Region(
            tuple(
                (max(0, a - h), min(size, b + h)) if b > a else (a, b)
                for (a, b), h, size in zip(layout.region(rank).intervals, halo, layout.shape)
            )
        )
        for rank in range(layout.mesh.size)
    )


@pytest.mark.parametrize("seed", range(20))
def test_messages_and_bytes_are_those_of_the_transfer_that_runs(seed: int) -> None:
    rng = random.Random(seed)
    mesh = rng.choice((prime_mesh(8), prime_mesh(12), Mesh((("a", 3), ("b", 4)))))
    shape = (rng.randint(3, 9), rng.randint(5, 20), rng.randint(5, 20))
    owns, wants = layouts(rng, mesh, shape, 2)
    transfer = Transfer(owns, haloed(rng, wants), wants.axes)
    for rank in range(mesh.size):
        there = received(MACHINE, owns, transfer.needs[rank], rank, 4)
        route = transfer.route(rank)
        if owns.region(rank) != transfer.needs[rank]:
            assert there.nbytes == transfer.received_bytes(rank, 4)
            assert there.messages == sum(len(boxes) for _, boxes in route.recvs)
        back, _ = returned(MACHINE, owns, transfer.needs[rank], rank, 4, wants.axes)
        sent = [box for _, boxes in transfer.adjoint(rank).sends for box in boxes]
        assert (back.messages, back.nbytes) == (len(sent), 4 * sum(box.size for box in sent))


@pytest.mark.parametrize("seed", range(20))
def test_tables_of_pairs_hold_what_single_pairs_cost(seed: int) -> None:
    rng = random.Random(seed)
    mesh = rng.choice((prime_mesh(8), MACHINE.mesh(16), MACHINE.mesh(12)))
    shape = (rng.randint(8, 16), rng.randint(16, 24), rng.randint(16, 24))
    owners, wanting = layouts(rng, mesh, shape, 6), layouts(rng, mesh, shape, 5)
    rank = rng.randrange(mesh.size)
    needs = [haloed(rng, layout)[rank] for layout in wanting]
    table = pair_costs(Owners(MACHINE, owners, rank, 4), needs, [layout.axes for layout in wanting], carries=True)
    for row, layout in enumerate(owners):
        for column, (need, want) in enumerate(zip(needs, wanting)):
            assert table.there_s[row, column] == pytest.approx(received(MACHINE, layout, need, rank, 4).seconds)
            back, sums = returned(MACHINE, layout, need, rank, 4, want.axes)
            repeated = layout.axes - want.axes
            if all(set(dim.axes) <= repeated or not set(dim.axes) & repeated for dim in layout.dims):
                assert table.back_s[row, column] == pytest.approx(back.seconds + sums)
            else:  # parts of a dim's axes repeat: which of the touched parts count is taken in proportion
                assert table.back_s[row, column] >= sums
    assert np.isfinite(table.back_s).all()


@pytest.mark.parametrize(("net", "spec"), [("mini-mesh", "n=2,h=3"), ("unet3d", "d=2,h=2"), ("mini-mesh", "n=3,w=2")])
def test_sampled_ranks_own_what_they_own_in_the_placement(net: str, spec: str) -> None:
    graph = zoo(net, 96 if net == "mini-mesh" else 16, 4, 0.25)
    mesh = prime_mesh(6 if "3" in spec else 4)
    plan = plan_by_hand(graph, mesh, spec)
    placement, sampled = Placement(graph, plan), Sampled(graph, plan)
    for name, layout in placement.layouts.items():
        assert sampled.layouts[name] == layout, name
    for node in graph.nodes:
        for rank in sampled.ranks:
            assert sampled.reads[node.name, rank] == placement.reads(node, rank)
