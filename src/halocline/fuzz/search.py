"""Goes through random nets for a while."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .check import Case, Unusable, check, draw_case
from .shrink import shrunk


@dataclass(frozen=True)
class Found:
    """A case in which the split net is not what one process is, made small."""

    number: int
    case: Case
    problem: str


@dataclass
class Tally:
    """How many nets have been tried, and how many of them said nothing."""

    tried: int = 0
    unusable: int = 0


def fuzz(
    seed: int, seconds: float, ranks: int = 8, first: int = 0, tally: Tally | None = None,
    look: Callable[[Tally], None] = lambda tally: None,
) -> Iterator[Found]:  # fmt: skip
    """Every failure among the nets `first`, `first + 1`, ... of `seed`, until `seconds` have passed."""
    tally, start_s, number = tally or Tally(), time.monotonic(), first
    while time.monotonic() - start_s < seconds:
        case = draw_case(seed, number, ranks)
        tally.tried += 1
        try:
            problem = check(case)
        except Unusable:
            tally.unusable += 1
        else:
            if problem is not None:
                yield Found(number, *shrunk(case, problem))
        look(tally)
        number += 1
