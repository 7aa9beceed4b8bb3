"""`ThreadComm` and `run_threads`: ranks as threads of one process, for tests and for looking at a split."""

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from halocline.comm.comm import DONE, Handle, Message, ReduceOp
from halocline.comm.message import check_messages, describe
from halocline.comm.reduction import check_reduction, from_wire, to_wire
from halocline.errors import CommError

Result = TypeVar("Result")

_REDUCE: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_ENDED = -1  # in place of a message's number: its source has returned
_FAILED = -2  # in place of a message's number: its source has failed, the payload says why


@dataclass
class _World:
    """What the threads share: an inbox per rank, and who failed first."""

    inboxes: list[SimpleQueue[tuple[int, int, Any]]]
    deadline_s: float
    timeout_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    failed: tuple[int, str] | None = None

    def fail(self, rank: int, reason: str) -> None:
        with self.lock:
            if self.failed is None:
                self.failed = (rank, reason)
        self.tell(rank, _FAILED)

    def tell(self, rank: int, number: int) -> None:
        for inbox in self.inboxes:
            inbox.put((rank, number, None))


class ThreadComm:
    """The `Comm` of one rank of `run_threads`.

    Stricter than the transports between processes, so that tests find what would be a race there: what is received
    is not a number until `wait`, a tensor that is changed before its send has ended is an error, and so is a
    message whose shape or dtype is not what the receiver expects.
    """

    name = "threads"

    def __init__(self, rank: int, world: _World) -> None:
        self.rank = rank
        self.size = len(world.inboxes)
        self._world = world
        self._arrived: dict[tuple[int, int], Any] = {}
        self._ended: set[int] = set()
        # Messages between two ranks are numbered when they are posted, so handles may be waited for in any order.
        self._sent = [0] * self.size
        self._expected = [0] * self.size

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        check_messages(self, sends, recvs)
        kept = []
        for peer, tensor in sends:
            copy = tensor.detach().clone()
            self._post(peer, copy)
            kept.append((peer, tensor, copy))
        awaited = []
        for peer, tensor in recvs:
            if tensor.is_floating_point():
                tensor.detach().fill_(float("nan"))
            awaited.append((peer, self._expect(peer), tensor))
        return _Exchange(self, kept, awaited)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...], op: ReduceOp = "sum") -> Handle:
        check_reduction(self, tensor, group, op)
        if len(group) == 1:
            return DONE
        copy = to_wire(tensor.clone(), op)
        peers = [rank for rank in group if rank != self.rank]
        for peer in peers:
            self._post(peer, (op, group, copy))
        return _Reduction(self, tensor, copy, group, op, {peer: self._expect(peer) for peer in peers})

    def all_gather_object(self, value: Any) -> list[Any]:
        data = pickle.dumps(value)  # as between processes: what comes back is a copy
        for peer in range(self.size):
            self._post(peer, data)
        return [pickle.loads(self._take(peer, self._expect(peer), bytes)) for peer in range(self.size)]

    def fail(self, reason: str) -> None:
        self._world.fail(self.rank, reason)

    def close(self) -> None:
        return None

    def _post(self, peer: int, payload: Any) -> None:
        self._world.inboxes[peer].put((self.rank, self._sent[peer], payload))
        self._sent[peer] += 1

    def _expect(self, peer: int) -> int:
        number = self._expected[peer]
        self._expected[peer] += 1
        return number

    def _take(self, peer: int, number: int, kind: type) -> Any:
        """The payload of message `number` of `peer`; blocks until it is here."""
        inbox = self._world.inboxes[self.rank]
        while (peer, number) not in self._arrived:
            if self._world.failed is not None:
                self._raise_failed(self._world.failed)
            if peer in self._ended:
                raise CommError(
                    f"rank {self.rank} of {self.size} (threads): awaits message {number} of rank {peer}, "
                    f"which has returned. The ranks do not make the same calls."
                )
            try:
                source, found, payload = inbox.get(timeout=max(0.0, self._world.deadline_s - time.monotonic()))
            except Empty:
                raise CommError(
                    f"rank {self.rank} of {self.size} (threads): rank {peer} is late: its message {number} has not "
                    f"come within the {self._world.timeout_s:g} s of this run."
                ) from None
            if found == _ENDED:
                self._ended.add(source)
            elif found != _FAILED:
                self._arrived[source, found] = payload
        payload = self._arrived.pop((peer, number))
        if not isinstance(payload, kind):
            raise CommError(
                f"rank {self.rank} of {self.size} (threads): message {number} of rank {peer} belongs to another kind "
                f"of call. The ranks do not make the same calls in the same order."
            )
        return payload

    def _raise_failed(self, failed: tuple[int, str]) -> NoReturn:
        raise CommError(f"rank {self.rank} of {self.size} (threads): rank {failed[0]} failed: {failed[1]}")


@dataclass
class _Exchange:
    comm: ThreadComm
    kept: list[tuple[int, Tensor, Tensor]]
    awaited: list[tuple[int, int, Tensor]]

    def wait(self) -> None:
        comm = self.comm
        for peer, tensor, copy in self.kept:
            if not torch.equal(_bytes(tensor), _bytes(copy)):
                raise CommError(
                    f"rank {comm.rank} of {comm.size} (threads): the tensor {describe(tensor)} sent to rank {peer} "
                    f"was changed before its send had ended. Write to it after `wait`."
                )
        self.kept = []
        for peer, number, tensor in self.awaited:
            found = comm._take(peer, number, Tensor)
            if found.shape != tensor.shape or found.dtype != tensor.dtype:
                raise CommError(
                    f"rank {comm.rank} of {comm.size} (threads): expects {describe(tensor)} from rank {peer}, "
                    f"which sent {describe(found)}. The two ranks do not follow the same plan."
                )
            tensor.detach().copy_(found)
        self.awaited = []


@dataclass
class _Reduction:
    comm: ThreadComm
    tensor: Tensor
    copy: Tensor
    group: tuple[int, ...]
    op: ReduceOp
    numbers: dict[int, int]

    def wait(self) -> None:
        if not self.numbers:
            return
        comm, reduce = self.comm, _REDUCE[self.op]
        total: Tensor | None = None
        for rank in self.group:  # in rank order on every rank, so that all hold equal bits
            part = self.copy
            if rank != comm.rank:
                op, group, part = comm._take(rank, self.numbers[rank], tuple)
                if (op, group, part.shape, part.dtype) != (self.op, self.group, self.copy.shape, self.copy.dtype):
                    raise CommError(
                        f"rank {comm.rank} of {comm.size} (threads): all_reduce {self.op} of {describe(self.copy)} "
                        f"over ranks {self.group}, while rank {rank} does {op} of {describe(part)} over {group}. "
                        f"The ranks do not make the same calls in the same order."
                    )
            total = part if total is None else reduce(total, part)
        assert total is not None
        from_wire(total, self.tensor, self.op)
        self.numbers = {}


def run_threads(size: int, fn: Callable[[ThreadComm], Result], timeout_s: float = 60.0) -> list[Result]:
    """Run `fn(comm)` on `size` ranks, each a thread with its own `ThreadComm`; their results, in rank order.

    When a rank raises, what the others await raises `CommError` at once, and the first exception is raised here.
    After `timeout_s` seconds in all, `CommError` names the ranks that are late (their threads are left behind).

    PyTorch's grad mode, inference mode and autocast belong to a thread: every rank starts with gradients on and
    autocast off, whatever the caller has set, so set them inside `fn`. Random state, the default dtype and the
    number of threads of an operation belong to the process: ranks share them.
    """
    world = _World([SimpleQueue() for _ in range(size)], time.monotonic() + timeout_s, timeout_s)
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        try:
            results[rank] = fn(ThreadComm(rank, world))
        except BaseException as error:
            errors[rank] = error
            world.fail(rank, f"{type(error).__name__}: {error}")
        else:
            world.tell(rank, _ENDED)

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        # A little more than the ranks give each other, so that their own errors, which say more, come first.
        thread.join(max(0.0, world.deadline_s - time.monotonic()) + 1.0)
    if errors:
        assert world.failed is not None
        first = world.failed[0]
        error = errors.get(first) or next(iter(errors.values()))
        error.add_note(f"(on rank {first} of {size})" if first in errors else f"(rank {first}: {world.failed[1]})")
        raise error
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        raise CommError(f"run_threads: ranks {late} of {size} have not returned after {timeout_s:g} s.")
    return results


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
