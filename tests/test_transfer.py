"""Every data movement brings exactly what is needed, and its adjoint is its transpose."""

import random

import pytest
import torch

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.exchange import Mover
from halocline.layout import Layout
from halocline.mesh import prime_mesh
from halocline.region import Region
from halocline.transfer import Transfer


def random_layout(rng: random.Random, shape: tuple[int, ...], ranks: int) -> Layout:
    mesh = prime_mesh(ranks)
    axes: dict[int, tuple[str, ...]] = {}
    for axis in mesh.names:
        if rng.random() < 0.8:
            dim = rng.randrange(len(shape))
            axes[dim] = (*axes.get(dim, ()), axis)
    return Layout.split(mesh, shape, axes)


def random_transfer(rng: random.Random) -> Transfer:
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
    ranks = rng.choice((1, 2, 3, 4, 6, 8))
    owns = random_layout(rng, shape, ranks)
    work = random_layout(rng, shape, ranks)

    def widened(region: Region) -> Region:
        return Region(
            tuple(
                (max(0, start - low), min(size, stop + high)) if stop > start else (start, start)
                for (start, stop), size, low, high in zip(region.intervals, shape, halo_low, halo_high)
            )
        )

    halo_low, halo_high = [[rng.randint(0, 4) for _ in shape] for _ in range(2)]
    return Transfer(owns, tuple(widened(work.region(rank)) for rank in range(ranks)), work.axes)


@pytest.mark.parametrize("seed", range(60))
def test_forward_brings_the_region_and_the_adjoint_is_its_transpose(seed: int) -> None:
    rng = random.Random(seed)
    transfer = random_transfer(rng)
    owns, mesh = transfer.owns, transfer.owns.mesh
    torch.manual_seed(seed)
    x = torch.randn(owns.shape, dtype=torch.float64)
    whole = Region.whole(owns.shape)

    # One gradient for each distinct piece of work: ranks that differ only along other axes computed the same.
    distinct = {mesh.part(rank, mesh.ordered(transfer.over)): rank for rank in reversed(range(mesh.size))}
    grads = {part: torch.randn(transfer.needs[rank].shape, dtype=torch.float64) for part, rank in distinct.items()}
    expected = torch.zeros_like(x)
    for part, rank in distinct.items():
        expected[transfer.needs[rank].within(whole)] += grads[part]

    def rank(comm: Comm) -> tuple[torch.Tensor, torch.Tensor]:
        mover = Mover(transfer, comm.rank)
        need = mover.finish(mover.start(x[owns.region(comm.rank).within(whole)].clone(), comm))
        grad = grads[mesh.part(comm.rank, mesh.ordered(transfer.over))].clone()
        back = mover.finish_adjoint(mover.start_adjoint(grad, comm)).clone()
        if transfer.sum_axes and back.numel():
            comm.all_reduce(back, mesh.group(comm.rank, transfer.sum_axes)).wait()
        return need, back

    inner_products = 0.0
    for number, (need, back) in enumerate(run_threads(mesh.size, rank)):
        assert torch.equal(need, x[transfer.needs[number].within(whole)])
        torch.testing.assert_close(back, expected[owns.region(number).within(whole)], rtol=1e-12, atol=1e-12)
        if distinct[mesh.part(number, mesh.ordered(transfer.over))] == number:
            inner_products += float((need * grads[mesh.part(number, mesh.ordered(transfer.over))]).sum())
    # <T x, g> = <x, T* g>
    assert inner_products == pytest.approx(float((x * expected).sum()), rel=1e-12, abs=1e-12)


def test_a_halo_wider_than_a_neighbour_comes_from_several_ranks() -> None:
    mesh = prime_mesh(4)
    owns = Layout.split(mesh, (10,), {0: mesh.names})
    transfer = Transfer(
        owns, tuple(Region(((max(0, a - 4), min(10, b + 4)),)) for a, b in owns.dims[0].parts), owns.axes
    )
    assert [peer for peer, _ in transfer.route(0).recvs] == [1, 2]
    assert [peer for peer, _ in transfer.route(1).sends] == [0, 2, 3]


def test_what_a_rank_owns_is_not_sent() -> None:
    mesh = prime_mesh(2)
    owns = Layout.split(mesh, (4, 4), {0: mesh.names})
    transfer = Transfer(owns, tuple(owns.region(rank) for rank in range(2)), owns.axes)
    assert transfer.in_place and transfer.local and transfer.route(0).sends == ()
