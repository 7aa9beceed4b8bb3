"""Where the time of a split step goes: the kernels of each op, and communication with all the packing around it."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from ..program import Compute, Free, Gradient, Instruction
from ..runtime import Runner, Tape

Do = Callable[[Tape, Any], None]
REST = "runtime"


def spent(runner: Runner, step: Callable[[], None], repeats: int) -> Mapping[str, float]:
    """The seconds that a step of `runner` spends on each op and on `exchange` and `sums`, the mean of `repeats` steps.

    `exchange` is halos, redistribution and statistics, `sums` the gradients of parameters; both with packing and with
    waiting for ranks that are late. `runtime` is what is left of the step.
    """
    totals: dict[str, float] = defaultdict(float)

    def timed(do: Do, instruction: Instruction) -> tuple[Do, Instruction]:
        name = _name(runner, instruction)

        def call(tape: Tape, given: Any) -> None:
            start = time.perf_counter()
            do(tape, given)
            totals[name] += time.perf_counter() - start

        return call, instruction

    lists = runner.forward_list, runner.backward_list
    runner.forward_list, runner.backward_list = ([timed(*entry) for entry in entries] for entries in lists)
    try:
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        whole = time.perf_counter() - start
    finally:
        runner.forward_list, runner.backward_list = lists
    totals[REST] = whole - sum(totals.values())
    ordered = sorted(totals.items(), key=lambda item: -item[1])
    return {name: seconds / repeats for name, seconds in ordered}


def _name(runner: Runner, instruction: Instruction) -> str:
    if isinstance(instruction, Compute | Gradient):
        return runner.bound[instruction.node].node.op
    if isinstance(instruction, Free):
        return REST
    return "sums" if type(instruction).__name__ in ("StartSum", "WaitSum") else "exchange"
