"""What a node's local computation does: flops, bytes moved, and bytes kept for the backward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from ..graph import Node
from ..ops import rule_for
from ..ops.rule import At, Rule, StagedRule
from ..region import Region


@dataclass(frozen=True)
class Work:
    """Of one rank's part of a node: flops and bytes to and from memory, forward and backward.

    Bytes count every tensor once that is read or written, as if all of it came from memory.
    """

    flops: float
    read_bytes: float
    written_bytes: float
    grad_flops: float
    grad_bytes: float

    @property
    def moved_bytes(self) -> float:
        """What the forward pass reads and writes."""
        return self.read_bytes + self.written_bytes


# Ops that return a view, or their input: they do no work.
VIEWS = frozenset(
    "reshape view _unsafe_view flatten unflatten ravel view_as reshape_as squeeze unsqueeze permute transpose swapaxes "
    "t numpy_T mT movedim moveaxis detach alias lift_fresh_copy contiguous expand slice select narrow dropout to "
    "atleast_1d atleast_2d atleast_3d identity".split()
)
# Passes over memory that one-pass counting leaves out: statistics are read before the values are normalised.
PASSES = {"batch_norm": (2.0, 2.0), "instance_norm": (2.0, 2.0), "group_norm": (2.0, 2.0), "layer_norm": (2.0, 2.0)}


def work(node: Node, at: At) -> Work:
    """The work of the box `at` of the node's index space."""
    rule = rule_for(node)
    return work_of(node, rule.reads(node, at), rule.writes(node, at))


def work_of(node: Node, reads: Sequence[Region], writes: Region, wanted: Sequence[bool] | None = None) -> Work:
    """The work of a node that reads `reads` and makes `writes`; `wanted` says which inputs get a gradient."""
    if writes.empty:
        return Work(0, 0, 0, 0, 0)
    wanted = [type.differentiable for type in node.input_types] if wanted is None else wanted
    read = [region.size * type.dtype.itemsize for region, type in zip(reads, node.input_types)]
    written = writes.size * node.type.dtype.itemsize
    if node.op in VIEWS and not (node.op == "dropout" and node.attrs.get("train")):
        return Work(0, 0, 0, 0, 0)
    flops = FLOPS.get(node.op, _elementwise)(node, reads, writes)
    forward, backward = PASSES.get(node.op, (1.0, 1.0))
    if not any(wanted):
        return Work(flops, sum(read) * forward, written, 0, 0)
    asked = sum(wanted[:2]) if node.op in CONTRACTIONS else 1
    grad_bytes = backward * (sum(read) + written) + sum(size for size, want in zip(read, wanted) if want)
    if node.op in CONTRACTIONS and asked == 2:  # the gradient is read for each of the two
        grad_bytes += written
    return Work(flops, sum(read) * forward, written, flops * asked, grad_bytes)


def _elementwise(node: Node, reads: Sequence[Region], writes: Region) -> float:
    return float(max([writes.size, *(region.size for region in reads)]))


def _convolution(node: Node, reads: Sequence[Region], writes: Region) -> float:
    return 2.0 * writes.size * prod(node.input_types[1].shape[1:])


def _transposed(node: Node, reads: Sequence[Region], writes: Region) -> float:
    return 2.0 * reads[0].size * prod(node.input_types[1].shape[1:])


def _linear(node: Node, reads: Sequence[Region], writes: Region) -> float:
    return 2.0 * writes.size * node.input_types[0].shape[-1]


def _addmm(node: Node, reads: Sequence[Region], writes: Region) -> float:
    return 2.0 * writes.size * node.input_types[1].shape[-1]


def _pooling(node: Node, reads: Sequence[Region], writes: Region) -> float:
    kernel = node.attrs.get("kernel_size")
    window = prod(kernel) if isinstance(kernel, (tuple, list)) else 1
    return float(max(writes.size * window, reads[0].size))


FLOPS: dict[str, Callable[[Node, Sequence[Region], Region], float]] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed),
    **dict.fromkeys(("linear", "matmul", "mm", "bmm"), _linear),
    "addmm": _addmm,
    **{f"{kind}_pool{dims}d": _pooling for kind in ("max", "avg") for dims in (1, 2, 3)},
}
CONTRACTIONS = frozenset(op for op, flops in FLOPS.items() if flops is not _pooling)
TRANSPOSED = frozenset(op for op, flops in FLOPS.items() if flops is _transposed)


@dataclass(frozen=True)
class Kept:
    """What a node holds for its backward pass: which inputs, whether its output, and other bytes an output element."""

    inputs: tuple[bool, ...]
    output: bool
    extra_bytes: int = 0


def _output_only(inputs: tuple[bool, ...]) -> Kept:
    return Kept((False,) * len(inputs), True)


def _nothing(inputs: tuple[bool, ...]) -> Kept:
    return Kept((False,) * len(inputs), False)


LEAN: dict[str, Callable[[tuple[bool, ...]], Kept]] = {
    "relu": _output_only,
    **dict.fromkeys(("add", "cat", "concat", "concatenate"), _nothing),
    **dict.fromkeys(VIEWS, _nothing),
    **{f"upsample_{kind}": _nothing for kind in ("nearest1d", "nearest2d", "nearest3d", "bilinear2d", "trilinear3d")},
    "dropout": _nothing,  # its mask is a hash, drawn again
}


def kept(node: Node, wanted: Sequence[bool]) -> Kept:
    """What the runtime keeps of `node` until its backward pass, where `wanted` says which inputs get a gradient.

    A plain rule keeps its autograd leaves and its output; a staged rule its first input; one with a `forward` of its
    own its inputs, unless `LEAN` says that it keeps less.
    """
    rule = rule_for(node)
    if not any(wanted):
        return Kept((False,) * len(node.inputs), False)
    inputs = tuple(type.differentiable for type in node.input_types)
    if isinstance(rule, StagedRule):
        return Kept((inputs[0], *(False,) * (len(inputs) - 1)), False)
    if node.op in LEAN:
        return LEAN[node.op](inputs)
    own_forward = type(rule).forward is not Rule.forward
    if node.op.startswith(("max_pool", "adaptive_max_pool")):
        return Kept(inputs, not own_forward, 8)  # the places of the maxima, int64
    return Kept(inputs, not own_forward)


def partial_bytes(node: Node, writes: Region, forward: bool) -> int:
    """The size of a partial value that the node combines over ranks."""
    if node.op in PASSES:
        channels = node.input_types[0].shape[1] if len(node.input_types[0].shape) > 1 else 1
        groups = writes.shape[0] if node.op in ("group_norm", "instance_norm") else 1
        return 24 * channels * groups if forward else 8 * channels * groups
    return max(8, min(writes.size, node.type.numel) * node.type.dtype.itemsize)
