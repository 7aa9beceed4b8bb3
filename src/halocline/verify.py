"""`verify`: the split net against the plain module in one process."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .autocast import without_autocast
from .capture import Loss
from .comm.comm import Comm
from .comm.connect import connect
from .graph import Graph, Node
from .ops import rule_for
from .ops.call_op import call_op
from .ops.draw import Random
from .ops.rule import Call, Noise
from .placement import box
from .prepared import leaves_of
from .region import Region
from .step import PlanSpec, Step, parallelize
from .tracing import tensors_in

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


@dataclass(frozen=True)
class Deviation:
    """How far one tensor is from one process: the largest difference over the largest magnitude.

    Gradients are measured against at least a thousandth of the largest gradient of the net, and running means against
    at least the standard deviation, so that one which is zero but for rounding does not count as all wrong.
    """

    kind: str  # output, loss, gradient, buffer
    name: str
    relative: float


@dataclass(frozen=True)
class Report:
    """The outcome of `verify`, the same on every rank."""

    deviations: tuple[Deviation, ...]
    tolerance: float
    first_difference: str | None

    @property
    def worst(self) -> Deviation:
        return max(self.deviations, key=lambda deviation: deviation.relative)

    @property
    def passed(self) -> bool:
        return all(deviation.relative <= self.tolerance for deviation in self.deviations)

    def __str__(self) -> str:
        lines = []
        for kind in dict.fromkeys(deviation.kind for deviation in self.deviations):
            of_kind = [deviation for deviation in self.deviations if deviation.kind == kind]
            worst = max(of_kind, key=lambda deviation: deviation.relative)
            lines.append(f"{kind:9} {len(of_kind):4}  largest deviation {worst.relative:.2e}  ({worst.name})")
        lines.append(f"{'equal' if self.passed else 'NOT EQUAL'} to one process within {self.tolerance:g}")
        if self.first_difference:
            lines.append(f"first layer that differs: {self.first_difference}")
        return "\n".join(lines)


def verify(
    model: nn.Module,
    loss: Loss | None,
    batch: Sequence[Tensor],
    plan: PlanSpec = "auto",
    *,
    comm: Comm | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> Report:
    """Runs one step split over all ranks and the plain module in one process, and compares everything.

    `batch` is the whole batch, the same on every rank. Compared are the loss (or every output), the gradient of every
    parameter, and every buffer afterwards; where something differs by more than `tolerance` (by dtype if not given),
    the layers are compared in order to find the first. The model is left as it was. Raises what `parallelize` raises.
    """
    comm = comm or connect()
    split_model = copy.deepcopy(model)
    step = parallelize(split_model, loss, batch, plan, comm=comm, seed=seed)
    parts = step.scatter(*batch)
    output = step(*parts)
    tensors = {f"output {i}": x for i, x in enumerate(tensors_in(output))}
    if loss is None:
        wholes = tensors_in(step.gather(output))
        cotangents = [torch.ones_like(x) / x.numel() for x in wholes]
        loose = [x for x in tensors.values() if x.requires_grad]
        pieces = [c for c, x in zip(_parts(step, cotangents), tensors.values()) if x.requires_grad]
        if loose:
            torch.autograd.backward(loose, pieces)
    else:
        wholes, cotangents = [output], []
        output.backward()
    got = _state("loss" if loss is not None else "output", wholes, split_model)
    deviations: tuple[Deviation, ...] = ()
    if comm.rank == 0:
        deviations = _compare(got, _one_process(step, model, loss, batch, cotangents))
    deviations = comm.all_gather_object(deviations)[0]
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    limit = TOLERANCES.get(dtype, 1e-4) if tolerance is None else tolerance
    report = Report(deviations, limit, None)
    if report.passed:
        return report
    return Report(deviations, limit, _first_difference(copy.deepcopy(model), loss, batch, plan, comm, limit, seed))


def _parts(step: Step, wholes: Sequence[Tensor]) -> list[Tensor]:
    placement = step.program.placement
    regions = [placement.layouts[name].region(step.comm.rank) for name in placement.graph.outputs]
    return [whole[region.within(Region.whole(whole.shape))] for whole, region in zip(wholes, regions)]


def _state(kind: str, outputs: Sequence[Tensor], model: nn.Module) -> dict[tuple[str, str], Tensor]:
    state = {(kind, str(i)): x.detach() for i, x in enumerate(outputs)}
    state |= {("gradient", name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    state |= {("parameter", name): p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    return state | {("buffer", name): b for name, b in model.named_buffers()}


def _one_process(
    step: Step, model: nn.Module, loss: Loss | None, batch: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> dict[tuple[str, str], Tensor]:
    """The plain module's outputs, gradients and buffers; random ops draw what the split net drew."""
    plain = copy.deepcopy(model)
    graph = step.program.graph
    if any(map(draws, graph.nodes)):
        leaves = leaves_of(graph, plain, loss)
        values = whole_values(graph, leaves | dict(zip(graph.inputs, batch)), step.noise)
        outputs = [values[name] for name in graph.outputs]
        with torch.no_grad():
            for buffer, value in graph.updates.items():
                leaves[buffer].copy_(values[value])
    else:
        output = plain(*batch) if loss is None else loss(plain(*batch[:-1]), batch[-1])
        outputs = tensors_in(output)
    if loss is not None:
        outputs[0].backward()
    elif any(x.requires_grad for x in outputs):
        loose = [(x, cotangent) for x, cotangent in zip(outputs, cotangents) if x.requires_grad]
        torch.autograd.backward([x for x, _ in loose], [cotangent for _, cotangent in loose])
    return _state("loss" if loss is not None else "output", outputs, plain)


def whole_values(graph: Graph, values: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
    """Every value of the graph in one process: each node's own ATen op called on whole tensors, no rule involved.

    Random ops are the exception: their rule draws what it draws for every split.
    """
    known = dict(values)
    for node in graph.nodes:
        inputs = [known[name] for name in node.inputs]
        known[node.name] = _whole_random(node, inputs, noise) if draws(node) else _call(node, inputs)
    return known


def draws(node: Node) -> bool:
    """Whether the node's op draws random numbers."""
    return isinstance(rule_for(node), Random) or (node.op in DROPOUTS and node["train"] and node["p"] > 0)


def _call(node: Node, inputs: Sequence[Tensor]) -> Tensor:
    attrs = {key: value for key, value in node.attrs.items() if key != "statistics"}
    read = [x.to(type.dtype) for x, type in zip(inputs, node.input_types)]  # leaves may be read in another dtype
    with without_autocast(read[0].device.type if read else "cpu"):
        return call_op(replace(node, attrs=attrs), read)


def _whole_random(node: Node, inputs: Sequence[Tensor], noise: Noise) -> Tensor:
    rule = rule_for(node)
    reads = tuple(Region.whole(type.shape) for type in node.input_types)
    return rule.run(Call(node, box(node, {}), reads, Region.whole(node.type.shape), (), noise), *inputs)


def _compare(got: Mapping[tuple[str, str], Tensor], want: Mapping[tuple[str, str], Tensor]) -> tuple[Deviation, ...]:
    largest = max((_size(x) for (kind, _), x in want.items() if kind == "gradient"), default=0.0)
    found = []
    for key in {**want, **got}:
        kind, name = key
        if key not in got or key not in want or got[key].shape != want[key].shape:
            found.append(Deviation(kind, f"{name} (missing or of another shape)", float("inf")))
            continue
        floor = 1e-3 * largest if kind == "gradient" else _spread(want, name)
        found.append(Deviation(kind, name, deviation(got[key], want[key], floor)))
    return tuple(found)


def _spread(want: Mapping[tuple[str, str], Tensor], name: str) -> float:
    """The standard deviation that belongs to a running mean, or 0."""
    variance = want.get(("buffer", name.removesuffix("running_mean") + "running_var"))
    return 0.0 if variance is None or not name.endswith("running_mean") else _size(variance) ** 0.5


def _size(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def deviation(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """The largest difference, over the largest magnitude of `want` (at least `floor`). NaN in one only is infinite."""
    a, b = got.detach().double(), want.detach().double()
    if not torch.equal(torch.isnan(a), torch.isnan(b)):
        return float("inf")
    a, b = torch.nan_to_num(a), torch.nan_to_num(b)
    difference = _size(a - b)
    return difference / max(_size(b), floor, 1e-300) if difference else 0.0


def _first_difference(
    model: nn.Module, loss: Loss | None, batch: Sequence[Tensor], plan: PlanSpec, comm: Comm, limit: float, seed: int
) -> str | None:
    """The first node, in order, whose value differs on any rank from that of its op called on whole tensors."""
    step = parallelize(model, loss, batch, plan, comm=comm, seed=seed)
    step.noise.step = 1
    graph, layouts = step.program.graph, step.program.placement.layouts
    leaves = {name: leaf.detach().clone() for name, leaf in step.leaves().items()}
    with torch.no_grad():
        wholes = whole_values(graph, leaves | dict(zip(graph.inputs, batch)), step.noise)
    parts = step.values_of(*step.scatter(*batch))
    for node in graph.nodes:
        whole = wholes[node.name]
        mine = whole[layouts[node.name].region(comm.rank).within(Region.whole(whole.shape))]
        worst = max(comm.all_gather_object(deviation(parts[node.name], mine, _size(whole))))
        if worst > limit:
            return f"{node.where()}, value `{node.name}`, deviation {worst:.2e}"
    return None
