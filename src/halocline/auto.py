"""`plan="auto"`: one rank plans, all ranks run the same plan."""

from .comm.comm import Comm
from .cost.calibrate import this_machine
from .cost.local_times import LocalTimes
from .cost.machine import Machine
from .errors import HaloclineError, PlanError
from .graph import Graph
from .mesh import Mesh
from .placement import Plan
from .search import plan


def plan_auto(
    graph: Graph,
    comm: Comm,
    mesh: Mesh | None = None,
    machine: Machine | None = None,
    memory_bytes: int | None = None,
    times: LocalTimes | None = None,
) -> Plan:
    """The best plan by the model, found on rank 0 and given to all. Every rank must call it.

    `machine` is the calibrated one of this host if it is not given. Raises PlanError, on every rank, if nothing fits.
    """
    made: tuple[str, str] | None = None
    if comm.rank == 0:
        try:
            machine = machine or this_machine(comm.size)
            made = "plan", plan(graph, mesh or comm.size, machine, memory_bytes, times=times).to_json()
        except HaloclineError as error:
            made = "error", str(error)
        except Exception as error:
            made = "error", f"planning failed with {type(error).__name__}: {error}"
    kind, text = comm.all_gather_object(made)[0]
    if kind == "error":
        raise PlanError(text)
    return Plan.from_json(text)
