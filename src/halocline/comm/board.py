"""Where ranks read which of them failed first and why: one key in the store of `torch.distributed`."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from torch._C._distributed_c10d import Store

_FAILED = "halocline/failed"
_READ_BY = "halocline/read_by"
WAITED, TIMED_OUT, ENDED = "waited", "timed out", "ended"


class Board:
    """The first failure among `size` ranks. What cannot reach its store (its host is gone) reads as no failure."""

    def __init__(self, store: Store, size: int) -> None:
        self._store = store
        self._size = size
        self._found: tuple[int, str] | None = None

    def post(self, rank: int, reason: str) -> None:
        """Put the failure of `rank` here, unless another is here already."""
        try:
            self._store.compare_set(_FAILED, "", json.dumps([rank, reason]))
        except RuntimeError:
            return
        self.read()

    def read(self, patience_s: float = 0.0) -> tuple[int, str] | None:
        """The rank that failed first and its reason; None if there is none within `patience_s`."""
        start_s = time.monotonic()
        while self._found is None:
            try:
                if self._store.check([_FAILED]):
                    rank, reason = json.loads(self._store.get(_FAILED))
                    self._found = (int(rank), str(reason))
                    self._store.add(_READ_BY, 1)
                    break
            except RuntimeError:
                break
            if time.monotonic() - start_s >= patience_s:
                break
            time.sleep(0.05)
        return self._found

    def note(self, rank: int, what: str) -> None:
        """Let the others see that `rank` has `what`: WAITED in vain, TIMED_OUT doing so, or ENDED."""
        with suppress(RuntimeError):
            self._store.set(f"halocline/{what}/{rank}", "1")

    def noted(self, what: str, patience_s: float = 0.0) -> set[int]:
        """The ranks that have noted `what` once all have, or `patience_s` has passed."""
        start_s, found = time.monotonic(), set[int]()
        while True:
            with suppress(RuntimeError):
                rest = set(range(self._size)) - found
                found |= {rank for rank in rest if self._store.check([f"halocline/{what}/{rank}"])}
            if len(found) == self._size or time.monotonic() - start_s >= patience_s:
                return found
            time.sleep(0.05)

    def linger(self, patience_s: float) -> None:
        """After a failure, return when every rank has read it; for the rank that is about to take the store away."""
        start_s = time.monotonic()
        try:
            while time.monotonic() - start_s < patience_s and self._store.add(_READ_BY, 0) < self._size:
                time.sleep(0.05)
        except RuntimeError:
            return


class Watch:
    """Looks at a `Board` while this rank waits, and calls `break_off` once there is a failure on it.

    A wait inside Gloo or NCCL cannot look for itself. One thread, which sleeps as long as nothing waits for long.
    """

    def __init__(self, board: Board, break_off: Callable[[], None], period_s: float = 0.5) -> None:
        self._board = board
        self._break_off = break_off
        self._period_s = period_s
        self._since_s: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="halocline watch", daemon=True)
        self._thread.start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, this rank counts as waiting."""
        self._since_s = time.monotonic()
        try:
            yield
        finally:
            self._since_s = None

    def stop(self) -> None:
        """Return when the thread has ended: one that Python finds in the store at its own end would abort it."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            since_s = self._since_s
            if since_s is None or time.monotonic() - since_s < self._period_s:
                continue
            if self._board.read() is not None:
                self._break_off()
                return
