"""A rank of four takes at most 0.35 of the memory of one process, counted in live tensors."""

import torch

from halocline.bench.alive import Alive
from halocline.bench.memory import TARGET, Net, peaks
from halocline.comm.threads import run_threads


def test_rank_of_four_takes_a_third_of_one_process() -> None:
    net = Net("mesh-tangling-1k", 256, 1, 0.125)
    measured = run_threads(4, lambda comm: peaks(comm, net, "spatial"))
    assert measured[0] == measured[3]
    assert 0.25 < measured[0].ratio <= TARGET, f"{measured[0].ratio:.3f}: {measured[0]}"


def test_alive_counts_memory_once_and_lets_it_go() -> None:
    held = torch.zeros(10)
    with Alive([held]) as alive:
        assert alive.now == 40
        first = torch.ones(100)
        second = first[5:].view(5, 19)
        assert alive.now == 440
        del first
        assert alive.now == 440
        del second
        assert alive.now == 40
        torch.ones(1000).sum()
        assert alive.now == 40
    assert alive.peak >= 4040


def test_alive_counts_what_autograd_keeps() -> None:
    x = torch.ones(1000, requires_grad=True)
    with Alive([]) as alive:
        y = (x * 2).exp().sin().sum()
        assert alive.now == 4004  # y, and the result of exp, which is the input of sin too
        y.backward()
        del y
        assert alive.now == 4000  # the gradient
