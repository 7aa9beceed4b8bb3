"""Meeting: every rank of a group knows that the others have come, or that one of them is late."""

import torch

from halocline.comm.comm import Comm


def meet(comm: Comm, group: tuple[int, ...]) -> None:
    """Return when every rank of `group` has called this, in log2 of its size rounds.

    Done before calls of MPI or `torch.distributed` that would wait without end, so that a late or failed rank raises
    `CommError` as everywhere else. (Hensgen, Finkel and Manber, Two algorithms for barrier synchronization, 1988.)
    """
    here, size, step = group.index(comm.rank), len(group), 1
    while step < size:
        token = torch.zeros(2, dtype=torch.uint8)
        to, source = group[(here + step) % size], group[(here - step) % size]
        comm.exchange([(to, token[:1])], [(source, token[1:])]).wait()
        step *= 2
