"""Whole networks over real MPI and real Gloo: split over processes they give the numbers of one process."""

import pytest

from tests.nets import NETS
from tests.processes import run


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_networks_over_mpi_and_gloo_equal_one_process(ranks: int) -> None:
    outcome = run("networks", ranks, "mpi", timeout_s=300)
    assert outcome.code == 0, outcome.text
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: all equal" in outcome.text
    for name in (name for name, net in NETS.items() if net.plans):
        verified = [line for line in outcome.text.splitlines() if f" {name} " in line and "equal within" in line]
        assert len(verified) == (1 if name == "resnet50" else 2), outcome.text
