import re
from itertools import combinations

import pytest

from halocline.cost.collective import allreduce_s, flat_s, shared
from halocline.cost.machine import load_machine, parse_machine, shipped
from halocline.errors import PlanError
from halocline.mesh import Mesh


@pytest.mark.parametrize("name", shipped())
def test_a_machine_reads_back_from_the_text_it_writes(name: str) -> None:
    machine = load_machine(name)
    again = parse_machine(machine.to_toml(), "text")
    assert again == machine


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("latency_s = 7e-06", "latency_s = -1.0", "level 0: `latency_s` is -1.0; expected seconds, above 0"),
        ("latency_s = 7e-06", "latency = 7e-06", "level 0: `latency_s` is missing"),
        ("memory_bytes = 17179869184", "memory_bytes = 0", "`memory_bytes` is 0; expected a positive whole number"),
        ("memory_bytes = 17179869184", 'memory_bytes = "16GiB"', "`memory_bytes` is '16GiB'"),
        ("efficiency = 0.65", "efficiency = 1.5", "local: `efficiency` is 1.5; expected a share"),
        ("float32 = 15700000000000.0", "float31 = 1.0", "flops_per_s: `float32` is missing"),
        ("overlap = 1.0", "overlap = 1.1", "`overlap` is 1.1"),
        ("overlap = 1.0", "overlap = nan", "`overlap` is nan"),
        ("ranks = 4", "ranks = 0", "level 0: `ranks` is 0"),
        ('name = "lassen"', "name = lassen", "not TOML"),
        ('name = "lassen"', 'name = "lassen"\nsped = 3', "`sped` is not a key here"),
        ("[local]", "[lokal]", "local: `efficiency` is missing; expected a share"),
    ],
)
def test_a_malformed_machine_file_names_the_key_and_what_was_expected(old: str, new: str, says: str) -> None:
    text = load_machine("lassen").to_toml()
    assert old in text
    with pytest.raises(PlanError, match=re.escape(says)):
        parse_machine(text.replace(old, new, 1), "machine file x.toml")


def test_an_unknown_machine_lists_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"`frontier`.*this, cpu-cluster, dgx-h100, lassen"):
        load_machine("frontier")


def test_levels_must_nest() -> None:
    text = load_machine("lassen").to_toml().replace("shared_by = 4", "ranks = 6\nshared_by = 4")
    with pytest.raises(PlanError, match="whole ones"):
        parse_machine(text, "text")


def test_the_mesh_keeps_axes_within_nodes() -> None:
    machine = load_machine("dgx-h100")
    mesh = machine.mesh(24)
    levels = [machine.level_of_axis(mesh, axis) for axis in mesh.names]
    assert mesh.sizes == (3, 2, 2, 2) and levels == [1, 0, 0, 0]
    for a, b in combinations(range(24), 2):
        differing = [axis for axis in mesh.names if mesh.coord(a, axis) != mesh.coord(b, axis)]
        assert machine.level_of(a, b) == max(machine.level_of_axis(mesh, axis) for axis in differing)


def test_an_allreduce_takes_the_algorithm_that_is_cheapest_for_its_size() -> None:
    machine = load_machine("lassen")
    level, gamma = machine.levels[1], machine.reduction_s_per_byte
    assert flat_s(level, gamma, 1, 1e6) == 0
    assert flat_s(level, gamma, 8, 8) == pytest.approx(3 * level.latency_s, rel=1e-3)
    large = flat_s(level, gamma, 8, 1e9)
    assert large == pytest.approx(2 * 7 / 8 * 1e9 * level.seconds_per_byte, rel=0.1)
    mesh = Mesh((("node", 8), ("gpu", 4)))
    across = allreduce_s(machine, mesh, ("node", "gpu"), 1e8)
    assert across < flat_s(shared(level), gamma, 32, 1e8)  # within nodes first: less goes over the slow level
    assert allreduce_s(machine, mesh, (), 1e8) == 0
    assert allreduce_s(machine, mesh, ("gpu",), 1e8) < allreduce_s(machine, mesh, ("node",), 1e8)
