"""`Program`: two lists of instructions, forward and backward, the same on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from .gradients import Manner, manners
from .graph import Graph
from .placement import Placement
from .transfer import Transfer


@dataclass(frozen=True)
class Fetch:
    """A value brought to the region that its `readers` need of it; readers with equal needs share one."""

    name: str
    value: str
    transfer: Transfer
    readers: tuple[str, ...]


@dataclass(frozen=True)
class Start:
    """Begin a fetch: send what others need of the value, post what comes in."""

    fetch: str


@dataclass(frozen=True)
class Wait:
    """End a fetch: the region needed is complete."""

    fetch: str


@dataclass(frozen=True)
class Compute:
    """Run a node on this rank's part, up to its next reduction or to its end."""

    node: str
    stage: int = 0


@dataclass(frozen=True)
class Reduce:
    """Combine a node's partial value over mesh axes."""

    node: str
    stage: int
    kind: str
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Free:
    """Forget values and fetched regions that nothing in the list reads any more."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Gradient(Compute):
    """Run a node's backward pass, up to its next reduction or to its end."""


@dataclass(frozen=True)
class GradientReduce(Reduce):
    """Combine a partial value of a node's backward pass."""


@dataclass(frozen=True)
class StartAdjoint:
    """Begin to send a fetched region's gradient back to the owners."""

    fetch: str


@dataclass(frozen=True)
class WaitAdjoint:
    """Add what came in to the gradient of the value that was fetched."""

    fetch: str


@dataclass(frozen=True)
class Bucket:
    """Gradients of replicated leaves that are summed over `axes` in one allreduce."""

    number: int
    axes: tuple[str, ...]
    leaves: tuple[str, ...]


@dataclass(frozen=True)
class StartSum:
    bucket: Bucket


@dataclass(frozen=True)
class WaitSum:
    bucket: Bucket


@dataclass(frozen=True)
class Again:
    """From here on instructions of the forward pass run again, for these nodes, and keep what backward needs."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Once:
    """The end of what `Again` began."""


Instruction: TypeAlias = (
    Start | Wait | Compute | Reduce | Free | Gradient | GradientReduce | StartAdjoint | WaitAdjoint | StartSum | WaitSum
    | Again | Once
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """What every rank does in a step.

    `feeds` gives, for each input of each node, the fetch that brings it, or the value itself where every rank owns
    exactly what it needs. `apart` names the nodes whose fetched boxes stay apart from what the rank owns, with the
    fetch: they compute on the owned block first (stage 0) and then add what the boxes give (stage 1).
    """

    placement: Placement
    fetches: Mapping[str, Fetch]
    feeds: Mapping[str, tuple[str, ...]]
    apart: Mapping[str, str]
    overwrite: frozenset[str]  # the nodes that put their output in place of their input
    differentiable: frozenset[str]
    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    recomputed: frozenset[str] = frozenset()  # the nodes that keep nothing in the forward pass and run again
    kept: frozenset[str] = frozenset()  # the values that these read, and that stay until then

    @property
    def graph(self) -> Graph:
        return self.placement.graph

    @cached_property
    def manners(self) -> Mapping[str, Manner]:
        """How each node runs beside its neighbours."""
        return manners(self.graph, self.overwrite)

    def __str__(self) -> str:
        return "\n".join(["forward", *map(self._line, self.forward), "backward", *map(self._line, self.backward)])

    def _line(self, instruction: Instruction) -> str:
        name = type(instruction).__name__
        match instruction:
            case Start(fetch) | Wait(fetch) | StartAdjoint(fetch) | WaitAdjoint(fetch):
                return f"  {name} {fetch}"
            case Reduce(node, stage, kind, axes):
                return f"  {name} {node}.{stage} {kind} over {'*'.join(axes) or 'nothing'}"
            case Compute(node, stage):
                return f"  {name} {node}.{stage}"
            case Free(names) | Again(names):
                return f"  {name} {' '.join(names)}"
            case StartSum(bucket) | WaitSum(bucket):
                return f"  {name} {bucket.number} over {'*'.join(bucket.axes)}: {' '.join(bucket.leaves)}"
            case Once():
                return f"  {name}"
