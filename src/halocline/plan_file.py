"""Plans from files, checked against the model, the batch and the ranks they are to be used for."""

import hashlib
from pathlib import Path

from .errors import PlanError
from .graph import Graph, TensorType
from .placement import Placement, Plan


def signature_of(graph: Graph) -> str:
    """What a plan must fit, in whatever dtype: the batch's shapes, and a digest of all nodes with their shapes."""
    batch = ", ".join(_shape(type) for type in graph.inputs.values())
    nodes = "\n".join(f"{node.name} {node.op} {_shape(node.type)}" for node in graph.nodes)
    return f"batch {batch}; {len(graph.nodes)} nodes {hashlib.blake2b(nodes.encode(), digest_size=6).hexdigest()}"


def _shape(type: TensorType) -> str:
    return " x ".join(map(str, type.shape)) or "a scalar"


def read_plan(path: Path, graph: Graph, ranks: int) -> Plan:
    """The plan in a file, for this graph and number of ranks.

    Raises PlanError for a file that is no plan, and for a plan that was made for another model, batch or number of
    ranks, or that splits what cannot be split.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"plan file {path}: it cannot be read: {error}") from error
    try:
        found = Plan.from_json(text)
        check_plan(found, graph, ranks)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    return found


def check_plan(found: Plan, graph: Graph, ranks: int) -> None:
    """Raises PlanError when `found` was made for another model, batch or number of ranks."""
    if found.mesh.size != ranks:
        raise PlanError(
            f"the plan was made for {found.mesh.size} ranks (mesh {found.mesh}), but {ranks} are to run it; plan anew"
        )
    here = signature_of(graph)
    if found.made_for and found.made_for != here:
        raise PlanError(
            f"the plan was made for another model, size or batch: for [{found.made_for}], but here is [{here}]"
        )
    nodes = {node.name for node in graph.nodes}
    if strangers := [name for names in found.recompute for name in names if name not in nodes]:
        raise PlanError(f"the plan recomputes `{strangers[0]}`, which is not in the model")
    if ranks <= 64:  # a placement of all ranks checks every split
        Placement(graph, found)
