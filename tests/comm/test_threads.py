"""Ranks as threads: what arrives, what is refused, and that nobody waits for a rank that has failed."""

import time

import pytest
import torch

from halocline.comm.single import SingleComm
from halocline.comm.threads import ThreadComm, run_threads
from halocline.errors import CommError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count) * 7 + rank).remainder(2 if dtype == torch.bool else 100).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exchange_keeps_values_sizes_and_order(dtype: torch.dtype) -> None:
    def rank_main(comm: ThreadComm) -> None:
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        sends = [(peer, values(comm.rank, comm.rank + peer + k, dtype)) for peer in others for k in (1, 5)]
        recvs = [(peer, torch.empty(comm.rank + peer + k, dtype=dtype)) for peer in others for k in (1, 5)]
        comm.exchange(sends, recvs).wait()
        for peer, tensor in recvs:
            assert torch.equal(tensor, values(peer, tensor.numel(), dtype))

    run_threads(3, rank_main)


def test_handles_may_be_waited_for_in_any_order() -> None:
    def rank_main(comm: ThreadComm) -> None:
        peer = 1 - comm.rank
        first, second, total = torch.empty(2), torch.empty(2), torch.full((2,), float(comm.rank + 1))
        one = comm.exchange([(peer, torch.full((2,), 10.0))], [(peer, first)])
        two = comm.all_reduce(total, (0, 1))
        three = comm.exchange([(peer, torch.full((2,), 20.0))], [(peer, second)])
        for handle in (three, two, one):
            handle.wait()
        assert first.tolist() == [10.0, 10.0] and second.tolist() == [20.0, 20.0] and total.tolist() == [3.0, 3.0]

    run_threads(2, rank_main)


def test_reduction_has_equal_bits_on_every_rank_and_only_in_its_group() -> None:
    def rank_main(comm: ThreadComm) -> torch.Tensor:
        tensor = torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank))
        if comm.rank != 1:
            comm.all_reduce(tensor, (0, 2, 3)).wait()
        return tensor

    found = run_threads(4, rank_main)
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    expected = parts[0] + parts[2] + parts[3]
    assert all(torch.equal(found[rank], expected) for rank in (0, 2, 3))
    assert torch.equal(found[1], parts[1])


@pytest.mark.parametrize("dtype", DTYPES[:6], ids=str)
def test_reductions(dtype: torch.dtype) -> None:
    def rank_main(comm: ThreadComm) -> None:
        for op, expected in (("sum", [6.0, 9.0]), ("max", [3.0, 4.0]), ("min", [1.0, 2.0])):
            tensor = torch.tensor([comm.rank + 1, comm.rank + 2]).to(dtype)
            comm.all_reduce(tensor, (0, 1, 2), op).wait()  # type: ignore[arg-type]
            assert tensor.tolist() == expected

    run_threads(3, rank_main)


def test_half_precision_is_summed_in_single_precision() -> None:
    def rank_main(comm: ThreadComm) -> float:
        tensor = torch.tensor([256.0 if comm.rank == 0 else 1.0], dtype=torch.bfloat16)
        comm.all_reduce(tensor, tuple(range(comm.size))).wait()
        return tensor.item()

    assert run_threads(5, rank_main) == [260.0] * 5  # one by one in bfloat16 it would stay 256


def test_objects_are_gathered_as_copies() -> None:
    mine = {"values": [1, 2]}
    found = run_threads(3, lambda comm: comm.all_gather_object((comm.rank, mine)))
    assert found == [[(0, mine), (1, mine), (2, mine)]] * 3
    assert all(entry[1] is not mine for gathered in found for entry in gathered)


def test_first_cause_is_raised_and_the_others_name_it() -> None:
    told: list[str] = []

    def rank_main(comm: ThreadComm) -> None:
        if comm.rank == 1:
            raise ValueError("layer3 has no such thing")
        try:
            comm.exchange([], [(1, torch.empty(1))]).wait()
        except CommError as error:
            told.append(str(error))
            raise

    start = time.monotonic()
    with pytest.raises(ValueError, match="layer3"):
        run_threads(3, rank_main)
    assert time.monotonic() - start < 1
    assert len(told) == 2 and all("rank 1 failed: ValueError: layer3" in text for text in told)


def test_fail_reaches_the_others() -> None:
    def rank_main(comm: ThreadComm) -> None:
        if comm.rank == 0:
            comm.fail("out of memory in layer2")
        else:
            comm.all_reduce(torch.ones(1), (0, 1, 2)).wait()

    with pytest.raises(CommError, match="rank 0 failed: out of memory in layer2"):
        run_threads(3, rank_main)


def test_rank_that_returned_is_not_waited_for() -> None:
    def rank_main(comm: ThreadComm) -> None:
        if comm.rank == 0:
            comm.exchange([], [(1, torch.empty(1))]).wait()

    with pytest.raises(CommError, match="rank 1, which has returned"):
        run_threads(2, rank_main)


def test_late_rank_is_named() -> None:
    def rank_main(comm: ThreadComm) -> None:
        if comm.rank == 0:
            comm.exchange([], [(1, torch.empty(1))]).wait()
        time.sleep(0.6)

    with pytest.raises(CommError, match="rank 1 is late"):
        run_threads(2, rank_main, timeout_s=0.2)


def test_sent_tensor_must_not_be_written_to() -> None:
    def rank_main(comm: ThreadComm) -> None:
        tensor = torch.zeros(3)
        handle = comm.exchange([(1 - comm.rank, tensor)], [(1 - comm.rank, torch.empty(3))])
        tensor[1] = 5
        handle.wait()

    with pytest.raises(CommError, match="changed before its send had ended"):
        run_threads(2, rank_main)


def test_mismatches_are_refused() -> None:
    def other_size(comm: ThreadComm) -> None:
        comm.exchange([(1 - comm.rank, torch.ones(3))], [(1 - comm.rank, torch.empty(3 + comm.rank))]).wait()

    def other_call(comm: ThreadComm) -> None:
        if comm.rank == 0:
            comm.all_reduce(torch.ones(1), (0, 1)).wait()
        else:
            comm.exchange([(0, torch.ones(1))], [(0, torch.ones(1))]).wait()

    with pytest.raises(CommError, match=r"expects float32\[4\] from rank 0, which sent float32\[3\]"):
        run_threads(2, other_size)
    with pytest.raises(CommError, match="the same calls in the same order"):
        run_threads(2, other_call)


@pytest.mark.parametrize(
    ("peer", "tensor", "text"),
    [
        (0, torch.ones(1), "passes nothing to itself"),
        (1, torch.ones(1), "no such rank"),
        (-1, torch.ones(1), "no such rank"),
    ],
)
def test_one_rank_alone_refuses_messages(peer: int, tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(CommError, match=text):
        SingleComm().exchange([(peer, tensor)], [])
    with pytest.raises(CommError, match=text):
        SingleComm().exchange([], [(peer, tensor)])


def test_messages_and_reductions_that_cannot_be_passed_are_refused() -> None:
    def rank_main(comm: ThreadComm) -> None:
        for tensor, text in ((torch.ones(4, 4).t()[:2], "Pack it first"), (torch.ones(0), "Leave such a message out")):
            with pytest.raises(CommError, match=text):
                comm.exchange([(1 - comm.rank, tensor)], [])
        for group in ((1 - comm.rank,), (1, 0), (0, 0, 1), (0, 1, 2)):
            with pytest.raises(CommError, match="sorted tuple of existing ranks"):
                comm.all_reduce(torch.ones(1), group)
        with pytest.raises(CommError, match="booleans have no sum"):
            comm.all_reduce(torch.ones(1, dtype=torch.bool), (0, 1))

    run_threads(2, rank_main)


def test_one_rank_alone_changes_nothing() -> None:
    comm, tensor = SingleComm(), torch.ones(3)
    comm.exchange([], []).wait()
    comm.all_reduce(tensor, (0,)).wait()
    assert tensor.tolist() == [1.0, 1.0, 1.0] and comm.all_gather_object("x") == ["x"]


def test_a_run_is_cheap() -> None:
    run_threads(2, lambda comm: comm.rank)
    start = time.perf_counter()
    for _ in range(50):
        assert run_threads(4, lambda comm: comm.rank) == [0, 1, 2, 3]
    assert (time.perf_counter() - start) / 50 / 4 < 1e-3
