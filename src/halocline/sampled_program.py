"""The program of a plan as a few ranks see it, at any number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .cost.sampled import Sampled
from .graph import Graph, Node
from .lowering import Lowering
from .ops import rule_for
from .ops.rule import AdditiveRule
from .placement import Placement, Plan
from .program import Fetch, Program
from .region import Region
from .transfer import Route, Transfer


class _Needs(Sequence[Region]):
    """What every rank needs of an input, worked out when it is asked for."""

    def __init__(self, placement: "SampledPlacement", node: Node, position: int) -> None:
        self.placement, self.node, self.position = placement, node, position
        self.known: dict[int, Region] = {}

    def __getitem__(self, rank: int) -> Region:  # type: ignore[override]
        if rank not in self.known:
            self.known[rank] = self.placement.reads(self.node, rank)[self.position]
        return self.known[rank]

    def __len__(self) -> int:
        return self.placement.mesh.size


@dataclass(frozen=True, eq=False)
class SampledTransfer(Transfer):
    """A transfer whose `local` and `in_place` are those of a few ranks."""

    ranks: tuple[int, ...] = (0,)

    @cached_property
    def local(self) -> bool:
        return all(self.owns.region(rank).holds(self.needs[rank]) for rank in self.ranks)

    @cached_property
    def in_place(self) -> bool:
        return all(self.owns.region(rank) == self.needs[rank] for rank in self.ranks)

    def route(self, rank: int) -> Route:
        """What `rank` receives is exact. Of many ranks, what it sends is taken to be as much, to the same peers."""
        if len(self.ranks) == self.owns.mesh.size:
            return super().route(rank)
        need = self.needs[rank]
        pieces = sorted(
            ((peer, box) for peer, box in self.owns.owners(need, near=rank) if peer != rank), key=lambda piece: piece[0]
        )
        messages = tuple((peer, (box,)) for peer, box in pieces)
        return Route(need.meet(self.owns.region(rank)), messages, messages)


class SampledPlacement(Placement):
    """A placement that does not ask the rules about every part; see `Sampled`."""

    @cached_property
    def sampled(self) -> Sampled:
        return Sampled(self.graph, self.plan)

    @cached_property
    def _resolved(self):  # type: ignore[no-untyped-def]
        return self.sampled.parts, self.sampled.layouts


def sampled_program(graph: Graph, plan: Plan, ranks: tuple[int, ...], wanted: frozenset[str]) -> Program:
    """The program that leaves gradients for `wanted`; what its transfers say holds for `ranks`."""
    return _Sampling(SampledPlacement(graph, plan), wanted, ranks).program()


class _Sampling(Lowering):
    def __init__(self, placement: SampledPlacement, wanted: frozenset[str], ranks: tuple[int, ...]) -> None:
        super().__init__(placement, wanted, "auto")
        self.ranks = ranks

    def _fetch_all(self) -> None:
        shared: dict[tuple[object, ...], str] = {}
        readers: dict[str, list[str]] = {}
        assert isinstance(self.placement, SampledPlacement)
        for node in self.graph.nodes:
            over = self.placement.over(node)
            feeds: list[str] = []
            for position, value in enumerate(node.inputs):
                needs = _Needs(self.placement, node, position)
                owns = self.placement.layouts[value]
                transfer = SampledTransfer(owns, needs, over, self.ranks)  # type: ignore[arg-type]
                if transfer.in_place and (value in self.graph.replicated or not transfer.sum_axes):
                    feeds.append(value)
                    continue
                key = (value, tuple(needs[rank] for rank in self.ranks), over)
                name = shared.setdefault(key, f"{value}>{node.name}" + "'" * feeds.count(f"{value}>{node.name}"))
                self.fetches.setdefault(name, Fetch(name, value, transfer, ()))
                readers.setdefault(name, []).append(node.name)
                feeds.append(name)
            self.feeds[node.name] = tuple(feeds)
        for name, nodes in readers.items():
            self.fetches[name] = replace(self.fetches[name], readers=tuple(dict.fromkeys(nodes)))

    def _additive(self, reader: Node, fetch: Fetch) -> bool:
        rule, transfer = rule_for(reader), fetch.transfer
        if not isinstance(rule, AdditiveRule) or self.feeds[reader.name].index(fetch.name) != 0:
            return False
        dims = set(range(len(transfer.owns.dims))) - set(rule.additive_dims(reader))
        return all(
            transfer.owns.region(rank).intervals[dim] == transfer.needs[rank].intervals[dim]
            for rank in self.ranks
            for dim in dims
        )
