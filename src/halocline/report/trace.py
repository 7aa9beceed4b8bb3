"""A simulated step as a trace for chrome://tracing and ui.perfetto.dev."""

import json
from pathlib import Path
from typing import Any

from ..errors import PlanError
from ..simulate import Simulated

STREAMS = ("compute", "messages", "sums")


def trace_document(simulated: Simulated) -> dict[str, Any]:
    """The trace-event JSON: a process for each rank, a thread for each of its streams, times in microseconds."""
    events: list[dict[str, Any]] = []
    for rank in simulated.ranks:
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for number, stream in enumerate(STREAMS):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": stream}})
    for event in simulated.events:
        events.append({
            "ph": "X", "name": event.name, "cat": event.stream, "pid": event.rank,
            "tid": STREAMS.index(event.stream), "ts": event.start_s * 1e6, "dur": event.seconds * 1e6,
        })  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(simulated: Simulated, path: Path) -> None:
    """Writes the trace to a file. Raises PlanError where that cannot be done."""
    try:
        path.write_text(json.dumps(trace_document(simulated)))
    except OSError as error:
        raise PlanError(f"--trace {path}: the trace cannot be written: {error.strerror or error}") from error
