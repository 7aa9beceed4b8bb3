"""Writes `networks.md`: what of each net is split in space, what is computed whole on every rank, and why.

`python docs/list_networks.py` writes it anew, from the graphs, plans and programs of the nets that the tests run (about
two minutes; the extra `nets` must be installed).
"""

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parent / "networks.md"
sys.path.insert(0, str(PAGE.parent.parent))  # the nets are those of the tests

from halocline.byhand import plan_by_hand  # noqa: E402
from halocline.capture import capture  # noqa: E402
from halocline.graph import Node  # noqa: E402
from halocline.lowering import lower  # noqa: E402
from halocline.mesh import prime_mesh  # noqa: E402
from halocline.ops import rule_for  # noqa: E402
from halocline.ops.fallback import Replicated  # noqa: E402
from halocline.placement import Placement  # noqa: E402
from halocline.program import Fetch, Program  # noqa: E402
from tests.nets_public import PUBLIC  # noqa: E402

RANKS = 3
INTRODUCTION = f"""# Networks

Public networks as their packages define them, small, each captured in training mode and split in space by hand
(`plan="spatial"`) over {RANKS} ranks. Written by `python docs/list_networks.py`. The tests hold every one of them to
the numbers of one process in double precision (VQVAE in single): output or loss, every gradient, every buffer, in
training and evaluation (`tests/test_public_nets.py`; with `-m slow` in more splits, and over samples).

*Split* counts the calls of ops of which every rank computes its part; *whole* those that every rank computes whole,
with the ops and the reason. The loss, and ops on parameters alone (such as weight norm), are not counted. *Halos*
counts the fetches of rows beyond a rank's own, *gathers* those of a whole tensor (which on a map of few rows a halo is
too), *moves* those of rows that all lie with others.

Reasons: **no space left**: the op's output has no rows, as after global pooling; **few rows**: fewer than ranks;
**not along rows**: each part would need the whole input; **no rule**: the op is computed whole for want of a rule.
"""


def page() -> str:
    """The text of `networks.md`."""
    warnings.simplefilter("ignore")
    lines = [INTRODUCTION]
    for package, nets in PUBLIC.items():
        lines += [
            f"## {package}\n",
            "| net | input | split | whole | halos | gathers | moves |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, net in nets.items():
            lines.append(row(name, *net.make()))
            print(lines[-1], file=sys.stderr)
        lines.append("")
    return "\n".join(lines)


def row(name: str, model: Any, loss: Any, batch: Any) -> str:
    """The line of one net."""
    graph, _ = capture(model, loss, batch)
    mesh = prime_mesh(RANKS)
    placement = Placement(graph, plan_by_hand(graph, mesh, "spatial"))
    program = lower(placement, frozenset(graph.parameters))
    split, whole = 0, Counter[tuple[str, str]]()
    for node in _of_the_batch(program):
        if placement.plan.splits[node.name]:
            split += 1
        else:
            whole[_reason(node, batch[0].dim()), node.op] += 1
    reasons: dict[str, list[str]] = {}
    for (reason, op), number in whole.items():
        reasons.setdefault(reason, []).append(f"{number} {op}" if number > 1 else op)
    text = "; ".join(f"{sum(n for (r, _), n in whole.items() if r == reason)} {reason}: {', '.join(ops)}"
                     for reason, ops in reasons.items())  # fmt: skip
    kinds = Counter(_kind(fetch) for fetch in program.fetches.values() if fetch.value not in graph.replicated)
    size = " x ".join(map(str, batch[0].shape))
    return (
        f"| {name} | {size} | {split} | {text or 'nothing'} | {kinds['halo']} | {kinds['gather']} | {kinds['move']} |"
    )


def _of_the_batch(program: Program) -> Iterator[Node]:
    """The model's nodes that depend on the batch."""
    constant = set(program.graph.replicated)
    for node in program.graph.nodes:
        if constant.issuperset(node.inputs):
            constant.add(node.name)
        elif not node.origin.module.startswith("loss"):
            yield node


def _reason(node: Node, rank: int) -> str:
    indices = rule_for(node).signature(node).indices
    rows = {5: "d", 4: "h", 3: "w"}.get(rank, "h")
    if isinstance(rule_for(node), Replicated):
        return "no rule"
    if len(node.type.shape) < rank - 1 or all(size == 1 for size in node.type.shape[2:]):
        return "no space left"
    return "few rows" if 0 < indices.get(rows, 0) < RANKS else "not along rows"


def _kind(fetch: Fetch) -> str:
    transfer = fetch.transfer
    regions = [transfer.owns.region(rank) for rank in range(RANKS)]
    if transfer.in_place or all(need.empty or need.meet(own) == need for need, own in zip(transfer.needs, regions)):
        return "local"
    shape = transfer.owns.shape
    if all(need.shape == tuple(shape) for need in transfer.needs if not need.empty):
        return "gather"
    return (
        "move" if any(need.meet(own).empty and not need.empty for need, own in zip(transfer.needs, regions)) else "halo"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(page())
