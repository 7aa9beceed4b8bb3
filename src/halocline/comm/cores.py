"""The cores of this host that this process may use, and a fair share of them for every rank."""

import os
from pathlib import Path


def find_cores(wanted: int, cpus: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """One cpu number per physical core that this process may run on, in order of socket and core.

    All its cpus, where that makes `wanted` of them and the cores alone do not.
    """
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    allowed = sorted(os.sched_getaffinity(0))
    cores: dict[tuple[int, int], int] = {}
    for cpu in allowed:
        try:
            topology = cpus / f"cpu{cpu}" / "topology"
            place = (int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text()))
        except (OSError, ValueError):
            place = (-1, cpu)
        cores.setdefault(place, cpu)
    if len(cores) < wanted <= len(allowed):
        return allowed
    return [cores[place] for place in sorted(cores)]


def find_quota(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """How many cores' time the container of this process may use; infinite if there is no such limit."""
    try:
        quota, period = limit.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")


def share_cores(cores: list[int], ranks: int) -> list[list[int]]:
    """An equal share of `cores` for each of `ranks`, neighbours together; empty if there are fewer cores than ranks."""
    each = len(cores) // ranks
    return [cores[rank * each : (rank + 1) * each] for rank in range(ranks)] if each else []
