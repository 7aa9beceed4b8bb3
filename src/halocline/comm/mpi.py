"""`MpiComm`: ranks as MPI processes, through mpi4py. CPU tensors."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from halocline.comm.comm import DONE, Handle, Message, ReduceOp
from halocline.comm.failure import choose_timeout_s, late, report
from halocline.comm.message import check_messages, describe
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

# A wait first tests without a break (a peer in step answers within microseconds), then lets others have the core
# between two tests, and after a while sleeps between them: by then a sleep is small against what was waited.
_SPINS = 100
_YIELD_S = 0.2
_SLEEP_S = 1e-4


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
        self._groups: dict[tuple[int, ...], MPI.Intracomm] = {tuple(range(self.size)): self._world}
        # What a wait has given up on: MPI may still write to it.
        self._lost: list[Any] = []

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        check_messages(self, sends, recvs)
        if not sends and not recvs:
            return DONE
        world = self._world
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
        for group in self._groups.values():
            group.Free()
        self._groups = {}

    def wait(self, done: Callable[[], bool], doing: str, waiting_for: Callable[[], list[int]], kept: Any) -> None:
        """Return when `done()`; after `timeout_s`, keep `kept` for ever and raise `CommError` naming the late ranks."""
        try:
            for _ in range(_SPINS):
                if done():
                    return
            start_s = time.monotonic()
            while not done():
                waited_s = time.monotonic() - start_s
                if waited_s > self.timeout_s:
                    self._lost.append(kept)
                    raise late(self, doing, waiting_for(), self.timeout_s)
                if waited_s < _YIELD_S:
                    os.sched_yield()
                else:
                    time.sleep(_SLEEP_S)
        except MPI.Exception as error:
            self._lost.append(kept)
            raise CommError(f"rank {self.rank} of {self.size} (mpi): {doing}: {error}") from error

    def _group(self, group: tuple[int, ...]) -> MPI.Intracomm:
        if group not in self._groups:
            # `Create_group` blocks until every member calls it: meet first, in a way that gives up on a late one.
            here, count, step = group.index(self.rank), len(group), 1
            while step < count:
                token = torch.zeros(2, dtype=torch.uint8)
                to, source = group[(here + step) % count], group[(here - step) % count]
                self.exchange([(to, token[:1])], [(source, token[1:])]).wait()
                step *= 2
            members = self._world.Get_group().Incl(list(group))
            self._groups[group] = self._world.Create_group(members, _GROUP_TAG)
            members.Free()
        return self._groups[group]

    def _bytes(self, tensor: Tensor) -> MPI.buffer:
        if not tensor.is_cpu:
            raise CommError(
                f"rank {self.rank} of {self.size} (mpi): {describe(tensor)} lies on {tensor.device}; MPI passes CPU "
                f"tensors here. For CUDA set HALOCLINE_TRANSPORT=nccl, or start under torchrun."
            )
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
        return [peer for peer, request in zip(peers, self._requests) if not request.Test()]


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
