"""`TorchDistComm`: ranks as the processes of `torch.distributed`: Gloo for CPU tensors, NCCL for CUDA tensors."""

import atexit
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from halocline.comm.board import ENDED, TIMED_OUT, WAITED, Board, Watch
from halocline.comm.comm import DONE, Handle, Message, ReduceOp
from halocline.comm.failure import ABSENT_PATIENCE_S, blamed, choose_timeout_s, gone, late, name_ranks
from halocline.comm.meet import meet
from halocline.comm.message import check_messages, foreign_device
from halocline.comm.reduction import check_reduction, from_wire, to_wire
from halocline.comm.started import OWN_STORE
from halocline.errors import CommError

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_MESSAGE_TAG = 1
_NEVER_TAG = 2  # nothing is ever sent under it

# A rank that fails says why before its connections close, but the store may answer after they have.
_REASON_PATIENCE_S = 1.0
_LINGER_S = 3.0


class TorchDistComm:
    """The `Comm` over an initialised `torch.distributed`, in groups of its own, so nothing of the user's is mixed in.

    `backend` is `gloo` or `nccl`; with `nccl`, CUDA tensors pass through NCCL and CPU tensors still through Gloo.
    A peer is waited for `timeout_s` seconds (default: see `choose_timeout_s`).

    With CUDA tensors, `wait` makes the current stream wait and returns at once: the tensors may then be used by what
    follows on that stream. Their failures show up later than on the CPU: at the first call after NCCL was told.
    """

    def __init__(self, backend: str, timeout_s: float | None = None) -> None:
        self.name = backend
        self.timeout_s = choose_timeout_s(timeout_s)
        self.rank: int = dist.get_rank()
        self.size: int = dist.get_world_size()
        self.closed = False
        self._backend = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
        self._everyone = tuple(range(self.size))
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._broken: str | None = None
        self._under_way = 0
        world = dist.new_group(backend=self._backend, timeout=timedelta(seconds=self.timeout_s))
        self._groups[self._everyone] = world
        if backend == "nccl":
            # NCCL wants all ranks in the first call of a group; an exchange may concern only some.
            dist.all_reduce(torch.zeros(1, device="cuda"), group=world)
        # Under the name of the group, so that a later group does not read the failure of this one.
        store = PrefixStore(world.group_name, _own_connection(dist.distributed_c10d._get_default_store()))
        self._board = Board(store, self.size)
        self._watch = Watch(self._board, self._break_off)
        atexit.register(self._leave)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        check_messages(self, sends, recvs)
        if not sends and not recvs:
            return DONE
        messages = [(self._bytes(tensor), peer, True) for peer, tensor in recvs]
        messages += [(self._bytes(tensor), peer, False) for peer, tensor in sends]
        peers = [peer for _, peer, _ in messages]
        doing = f"exchange with {' and '.join(f'rank {peer}' for peer in sorted(set(peers)))}"
        with self._explaining(doing, peers):
            world = self._groups[self._everyone]
            if messages[0][0].is_cuda:
                ops = [
                    dist.P2POp(dist.irecv if recv else dist.isend, data, peer, world) for data, peer, recv in messages
                ]
                works = dist.batch_isend_irecv(ops)
            else:
                works = [
                    (world.recv if recv else world.send)([data], peer, _MESSAGE_TAG) for data, peer, recv in messages
                ]
        return _Works(self, works, doing, [[peer] for peer in peers], messages)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...], op: ReduceOp = "sum") -> Handle:
        check_reduction(self, tensor, group, op)
        if len(group) == 1:
            return DONE
        self._check_device(tensor)
        others = [rank for rank in group if rank != self.rank]
        doing = f"all_reduce over {group}"
        wire = to_wire(tensor, op)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        with self._explaining(doing, others):
            work = self._group(group).allreduce([wire], options)
        return _Works(self, [work], doing, [others], wire, lambda: from_wire(wire, tensor, op))

    def all_gather_object(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        others = [rank for rank in range(self.size) if rank != self.rank]
        with self._explaining("all_gather_object", others), self._watch.waiting():
            dist.all_gather_object(gathered, value, group=self._groups[self._everyone])
        return gathered

    def fail(self, reason: str) -> None:
        """Say why in the store, where the others read it, and close the connections on which they wait."""
        reason = " ".join(reason.split())
        self._broken = self._broken or f"it has failed itself: {reason}"
        self._board.post(self.rank, reason)
        self._break_off()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._watch.stop()
        if self._broken is None:
            self._board.note(self.rank, ENDED)
            self._broken = "it is closed"
        atexit.unregister(self._leave)
        # The threads of a group end with the last reference to it. One that is left when Python ends, and then has to
        # let go of a tensor, would abort the process.
        while self._groups:
            with suppress(RuntimeError, ValueError, AssertionError):  # the user may have destroyed them all
                dist.destroy_process_group(self._groups.popitem()[1])

    def wait(self, works: list[dist.Work], doing: str, peers: list[list[int]]) -> None:
        """Wait for all `works`, each with its `peers`; raise `CommError` naming the ranks behind a failure."""
        timeout = timedelta(seconds=self.timeout_s)
        with self._watch.waiting():
            for work, awaited in zip(works, peers):
                with self._explaining(doing, awaited):
                    # With a timeout, NCCL would make the host wait and not the stream.
                    if self.name == "gloo":
                        work.wait(timeout)
                    else:
                        work.wait()

    @contextmanager
    def _explaining(self, doing: str, peers: list[int]) -> Iterator[None]:
        """Turn what `torch.distributed` raises into a `CommError` that names `doing`, the late or lost rank and why."""
        where = f"rank {self.rank} of {self.size} ({self.name}): {doing}"
        if self._broken is not None:
            raise CommError(f"{where}: this rank can no longer communicate: {self._broken}")
        try:
            yield
        except RuntimeError as error:
            # Without Gloo's source line before, and its advice after.
            found = re.sub(r"^\[\S*\] ", "", str(error)).splitlines()[0].split(". ")[0]
            is_late = "timed out" in found.lower()
            self._board.note(self.rank, WAITED)
            if is_late:
                self._board.note(self.rank, TIMED_OUT)
            failed = self._board.read(0.0 if is_late else _REASON_PATIENCE_S)
            if failed is None and not is_late and self._board.noted(TIMED_OUT):
                failed = self._board.read(2 * ABSENT_PATIENCE_S)  # one of those is finding out who is late
            if failed is not None and failed[0] != self.rank:
                told = CommError(f"{where}: rank {failed[0]} failed: {failed[1]}")
            elif is_late:
                absent = set(range(self.size)) - self._board.noted(WAITED, min(ABSENT_PATIENCE_S, self.timeout_s))
                told = late(self, doing, blamed(absent, peers), self.timeout_s)
                self._board.post(self.rank, str(told))
            elif ended := self._board.noted(ENDED).intersection(peers):
                told = gone(self, doing, ended)
            else:
                told = CommError(
                    f"{where}: a connection is lost, and {name_ranks(peers)} awaited, which left no reason. It was "
                    f"probably killed: look at its output, and at the memory of its host. ({found})"
                )
            self._broken = self._broken or str(told)
            raise told from error

    def _group(self, group: tuple[int, ...]) -> dist.ProcessGroup:
        if group not in self._groups:
            meet(self, group)
            self._groups[group] = dist.new_group(
                list(group),
                backend=self._backend,
                timeout=timedelta(seconds=self.timeout_s),
                use_local_synchronization=True,
            )
        return self._groups[group]

    def _bytes(self, tensor: Tensor) -> Tensor:
        self._check_device(tensor)
        return tensor.detach().view(-1).view(torch.uint8)

    def _check_device(self, tensor: Tensor) -> None:
        if not tensor.is_cpu and not (tensor.is_cuda and self.name == "nccl"):
            raise CommError(foreign_device(self, tensor))

    def _break_off(self) -> None:
        """End whatever this rank or its peers wait for on these groups. They cannot be used afterwards."""
        byte = torch.empty(1, dtype=torch.uint8)
        for group in list(self._groups.values()):
            # Gloo closes all connections of a group when one wait on them times out.
            with suppress(RuntimeError):
                group.recv([byte], (group.rank() + 1) % group.size(), _NEVER_TAG).wait(timedelta(milliseconds=1))
            if self.name == "nccl":
                with suppress(RuntimeError):
                    group.abort()

    def _leave(self) -> None:
        """End with the process, where nobody has called `close`: PyTorch may abort if it finds its groups then."""
        if self._broken is not None and self.rank == 0 and os.environ.get(OWN_STORE) != "True":
            # The store ends with this process: let the others read from it first.
            self._board.linger(_LINGER_S)
        if self._under_way:
            self._break_off()
        self.close()


class _Works:
    """The handle of `works`; it keeps `tensors` until then."""

    def __init__(
        self,
        comm: TorchDistComm,
        works: list[dist.Work],
        doing: str,
        peers: list[list[int]],
        tensors: Any,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._comm = comm
        self._works = works
        self._doing = doing
        self._peers = peers
        self._tensors = tensors
        self._finish = finish
        comm._under_way += 1

    def wait(self) -> None:
        if not self._works:
            return
        self._comm.wait(self._works, self._doing, self._peers)
        self._finish()
        self._works, self._tensors = [], None
        self._comm._under_way -= 1


def _own_connection(store: Store) -> Store:
    """A second connection to `store`: one connection answers one caller at a time, and a wait may hold it."""
    try:
        return store.clone()  # type: ignore[attr-defined,no-any-return]
    except RuntimeError:
        return store
