"""How many bytes of tensors are alive, counted as ops make them and as their memory is let go."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, counts the bytes of all tensors that this thread's ops make, as long as anything holds their memory.

    `now` and `peak` are in bytes and begin with the tensors `held`. Memory that several tensors share counts once;
    memory of tensors that are not `held` and were there before does not count.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: set[int] = set()
        self.now = self.peak = 0
        for tensor in held:
            self._see(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return result

    def _see(self, tensor: Tensor) -> None:
        if tensor.is_mkldnn:  # a passing copy, which has no storage to look at
            return
        storage = tensor.untyped_storage()
        if id(storage) in self.known or not storage.nbytes():
            return
        self.known.add(id(storage))
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, id(storage), storage.nbytes())

    def _forget(self, number: int, nbytes: int) -> None:
        self.known.discard(number)
        self.now -= nbytes
