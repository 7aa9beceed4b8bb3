"""How long a rank waits for another, and what is said when it has waited in vain."""

import os
import sys
from collections.abc import Collection, Iterable

from halocline.comm.message import Place
from halocline.errors import CommError

TIMEOUT_VARIABLE = "HALOCLINE_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 300.0
ABSENT_PATIENCE_S = 3.0  # ranks that have waited in vain give each other so long to say so: the others are late


def choose_timeout_s(given: float | None) -> float:
    """Seconds to wait for a peer: `given`, else `HALOCLINE_TIMEOUT_S`, else 300. Raises `CommError` if not positive."""
    found = os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S) if given is None else given
    try:
        timeout_s = float(found)
    except ValueError:
        timeout_s = 0.0
    if not timeout_s > 0:
        raise CommError(f"{TIMEOUT_VARIABLE} is {found!r}; it is the number of seconds to wait for a rank, above 0.")
    return timeout_s


def late(place: Place, doing: str, peers: Iterable[int], timeout_s: float) -> CommError:
    """The error of a rank that has waited `timeout_s` for `peers` while `doing` something."""
    return CommError(
        f"rank {place.rank} of {place.size} ({place.name}): {doing}: {name_ranks(peers)} late; nothing has come for "
        f"{timeout_s:g} s. Look at what that rank does, or raise {TIMEOUT_VARIABLE}."
    )


def gone(place: Place, doing: str, peers: Iterable[int]) -> CommError:
    """The error of a rank that waits for `peers` which have come to their end without failing."""
    return CommError(
        f"rank {place.rank} of {place.size} ({place.name}): {doing}: {name_ranks(peers)} awaited, but has ended. "
        f"The ranks do not make the same calls, or it has failed: look at its output."
    )


def blamed(absent: set[int], awaited: Collection[int]) -> Collection[int]:
    """Who is late: of those that do not wait as this rank does the ones it waits for, else any, else all awaited."""
    return absent.intersection(awaited) or absent or awaited


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 1 is`, `ranks 1, 2 and 5 are`."""
    names = [str(rank) for rank in sorted(set(ranks))]
    if len(names) == 1:
        return f"rank {names[0]} is"
    return f"ranks {', '.join(names[:-1])} and {names[-1]} are"


def report(place: Place, reason: str) -> str:
    """Print on stderr, as one paragraph, that this rank has failed and why; the reason on one line."""
    reason = " ".join(reason.split())
    sys.stdout.flush()
    print(f"halocline: rank {place.rank} failed: {reason}", file=sys.stderr, flush=True)
    return reason
