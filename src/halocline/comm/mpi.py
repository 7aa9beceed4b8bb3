"""`MpiComm`: ranks as MPI processes, through mpi4py. CPU tensors."""

import atexit
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from halocline.comm.comm import DONE, Handle, Message, ReduceOp
from halocline.comm.failure import ABSENT_PATIENCE_S, blamed, choose_timeout_s, gone, late, report
from halocline.comm.meet import meet
from halocline.comm.message import check_messages, describe, foreign_device
from halocline.comm.reduction import check_reduction, from_wire, to_wire
from halocline.errors import CommError

_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}
_MESSAGE_TAG = 1
_GROUP_TAG = 2
_ENDED_TAG = 3
_WAITED_TAG = 4

# A wait first tests without a break (a peer in step answers within microseconds), then lets others have the core
# between two tests, and after a while sleeps between them: by then a sleep is small against what was waited.
_SPINS = 100
_YIELD_S = 0.2
_SLEEP_S = 1e-4
_ENDED_GRACE_S = 1.0  # what a rank sent before it ended may still be on its way


class MpiComm:
    """The `Comm` over MPI. `parent` is duplicated, so nothing of the user's is ever received by mistake.

    A peer is waited for `timeout_s` seconds (default: see `choose_timeout_s`). Sums are taken in the order that MPI
    chooses, which gives all ranks of a group the same bits.
    """

    name = "mpi"

    def __init__(self, parent: MPI.Intracomm = MPI.COMM_WORLD, timeout_s: float | None = None) -> None:
        self.timeout_s = choose_timeout_s(timeout_s)
        self._world: MPI.Intracomm = parent.Dup()
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()
        self.closed = False
        self._groups: dict[tuple[int, ...], MPI.Intracomm] = {tuple(range(self.size)): self._world}
        # What a wait has given up on: MPI may still write to it.
        self._lost: list[Any] = []
        # Ranks that have met this one, and would wait for it; and those that have told that they have ended.
        self._partners: set[int] = set()
        self._ended: set[int] = set()
        meet(self, tuple(range(self.size)))
        atexit.register(self._leave)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        check_messages(self, sends, recvs)
        if not sends and not recvs:
            return DONE
        world = self._world
        self._partners.update([peer for peer, _ in recvs])
        requests = [world.Irecv(self._bytes(tensor), peer, _MESSAGE_TAG) for peer, tensor in recvs]
        requests += [world.Isend(self._bytes(tensor), peer, _MESSAGE_TAG) for peer, tensor in sends]
        return _Exchange(self, requests, recvs, sends)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...], op: ReduceOp = "sum") -> Handle:
        check_reduction(self, tensor, group, op)
        if len(group) == 1:
            return DONE
        wire = to_wire(tensor, op)
        buffer = [self._bytes(wire), wire.numel(), _TYPES[wire.dtype]]
        request = self._group(group).Iallreduce(MPI.IN_PLACE, buffer, _OPS[op])
        return _Reduction(self, request, wire, tensor, group, op)

    def all_gather_object(self, value: Any) -> list[Any]:
        # Met first without blocking, so that a rank that never comes is an error and not an endless wait.
        others = [rank for rank in range(self.size) if rank != self.rank]
        self.wait(self._world.Ibarrier().Test, "all_gather_object", lambda: others, None)
        return self._world.allgather(value)

    def fail(self, reason: str) -> None:
        """Print why, and end every process of the MPI job with exit code 1."""
        report(self, reason)
        self._world.Abort(1)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        atexit.unregister(self._leave)
        for group in self._groups.values():
            group.Free()
        self._groups = {}

    def wait(self, done: Callable[[], bool], doing: str, waiting_for: Callable[[], list[int]], kept: Any) -> None:
        """Return when `done()`. When that cannot be, keep `kept` for ever and raise `CommError` naming the ranks."""
        try:
            for _ in range(_SPINS):
                if done():
                    return
            self._wait_long(done, doing, waiting_for)
        except MPI.Exception as error:
            self._lost.append(kept)
            raise CommError(f"rank {self.rank} of {self.size} (mpi): {doing}: {error}") from error
        except BaseException:
            self._lost.append(kept)
            raise

    def _wait_long(self, done: Callable[[], bool], doing: str, waiting_for: Callable[[], list[int]]) -> None:
        start_s, give_up_s = time.monotonic(), float("inf")
        while not done():
            now_s = time.monotonic()
            if now_s - start_s < _YIELD_S:
                os.sched_yield()
                continue
            time.sleep(_SLEEP_S)
            ended = self._find_ended().intersection(waiting_for())
            if ended and now_s > give_up_s:
                raise gone(self, doing, ended)
            if ended and give_up_s == float("inf"):
                give_up_s = now_s + _ENDED_GRACE_S
            if now_s - start_s > self.timeout_s:
                raise late(self, doing, blamed(self._find_absent(), waiting_for()), self.timeout_s)

    def _find_absent(self) -> set[int]:
        """The ranks that do not wait in vain as this one does: it is they who are late."""
        absent = set(range(self.size)) - {self.rank}
        self._lost += [self._world.Isend(b"", peer, _WAITED_TAG) for peer in absent]
        deadline_s, status = time.monotonic() + min(ABSENT_PATIENCE_S, self.timeout_s), MPI.Status()
        while absent and time.monotonic() < deadline_s:
            if self._world.Iprobe(MPI.ANY_SOURCE, _WAITED_TAG, status):
                self._world.Recv(bytearray(1), status.Get_source(), _WAITED_TAG)
                absent.discard(status.Get_source())
            else:
                time.sleep(_SLEEP_S)
        return absent

    def _find_ended(self) -> set[int]:
        status = MPI.Status()
        while self._world.Iprobe(MPI.ANY_SOURCE, _ENDED_TAG, status):
            self._world.Recv(bytearray(1), status.Get_source(), _ENDED_TAG)
            self._ended.add(status.Get_source())
        return self._ended

    def _leave(self) -> None:
        """Tell those who may wait for this rank that it has ended. (MPI itself would now wait for them.)"""
        if not MPI.Is_finalized():
            self._lost += [self._world.Isend(b"", peer, _ENDED_TAG) for peer in self._partners]

    def _group(self, group: tuple[int, ...]) -> MPI.Intracomm:
        if group not in self._groups:
            meet(self, group)  # `Create_group` would wait for its members without end
            members = self._world.Get_group().Incl(list(group))
            self._groups[group] = self._world.Create_group(members, _GROUP_TAG)
            members.Free()
        return self._groups[group]

    def _bytes(self, tensor: Tensor) -> MPI.buffer:
        if not tensor.is_cpu:
            raise CommError(foreign_device(self, tensor))
        # By address, because NumPy has no bfloat16; the handle keeps the tensor.
        return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


class _Exchange:
    def __init__(
        self, comm: MpiComm, requests: list[MPI.Request], recvs: Sequence[Message], sends: Sequence[Message]
    ) -> None:
        self._comm = comm
        self._requests = requests
        self._recvs = recvs
        self._sends = sends

    def wait(self) -> None:
        requests, comm = self._requests, self._comm
        if not requests:
            return
        statuses = [MPI.Status() for _ in requests]
        comm.wait(lambda: MPI.Request.Testall(requests, statuses), "exchange", self._late, self)
        self._requests = []
        for (peer, tensor), status in zip(self._recvs, statuses):
            if status.Get_count(MPI.BYTE) != tensor.nbytes:
                raise CommError(
                    f"rank {comm.rank} of {comm.size} (mpi): expects {tensor.nbytes} bytes, {describe(tensor)}, from "
                    f"rank {peer}, which sent {status.Get_count(MPI.BYTE)}. The two ranks do not follow the same plan."
                )

    def _late(self) -> list[int]:
        peers = [peer for peer, _ in self._recvs] + [peer for peer, _ in self._sends]
        return [peer for peer, request in zip(peers, self._requests) if not request.Get_status()]


class _Reduction:
    def __init__(
        self, comm: MpiComm, request: MPI.Request, wire: Tensor, tensor: Tensor, group: tuple[int, ...], op: ReduceOp
    ) -> None:
        self._comm = comm
        self._request: MPI.Request | None = request
        self._wire = wire
        self._tensor = tensor
        self._group = group
        self._op = op

    def wait(self) -> None:
        if self._request is None:
            return
        others = [rank for rank in self._group if rank != self._comm.rank]
        self._comm.wait(self._request.Test, f"all_reduce over {self._group}", lambda: others, self)
        from_wire(self._wire, self._tensor, self._op)
        self._request = None
