"""`Rule`: everything about one op. Ops compute, transfers move: no rule ever communicates.

An op has a named *index space*. A plan gives some of its indices to mesh axes; from the box of index space that a rank
computes, the rule says in global coordinates what the rank reads of each input and what it writes. An op whose result
needs all ranks (batch norm, a mean over a split dim) is a `StagedRule`: it yields a partial value, and gets it back
reduced over the ranks that split the named indices.
"""

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, Literal

import torch
from torch import Tensor

from ..graph import Node, TensorType
from ..region import Interval, Region

At = Mapping[str, Interval]
Dims = tuple[str | None, ...]
Grads = tuple[Tensor | None, ...]
Stages = Generator[Tensor, Tensor, Any]


@dataclass(frozen=True)
class Signature:
    """The index space of a node, and which index runs along each dim of its inputs and of its output.

    `indices` holds the size of every index that may be split; a dim along which no such index runs is None and is
    read, or written, whole.
    """

    indices: Mapping[str, int]
    inputs: tuple[Dims, ...]
    output: Dims


@dataclass(frozen=True)
class Reduction:
    """A partial value that is combined over the ranks that split the indices `over`.

    `moments` combines rows `(count, mean, sum of squared deviations)` of shape [3, ...] by the pairwise update of
    Chan, Golub and LeVeque (1979), which loses no precision where the mean is large beside the deviation.
    """

    kind: Literal["sum", "max", "min", "moments"]
    over: tuple[str, ...]


@dataclass
class Noise:
    """What random ops draw from: a seed for the run and the number of the step. The same on every rank."""

    seed: int = 0
    step: int = 0


@dataclass(frozen=True)
class Call:
    """A node bound to one rank's part of it.

    `at` is the box of index space to compute, `reads` the global region of each input that the rank is given (within
    the tensor: what a window reads beyond it is the rule's to fill), `writes` the global region to return, `wanted`
    which inputs need a gradient.
    """

    node: Node
    at: At
    reads: tuple[Region, ...]
    writes: Region
    wanted: tuple[bool, ...]
    noise: Noise = field(default_factory=Noise)
    overwrite: bool = False  # whether the first input's memory may hold the output: nothing else looks at it
    then: str = ""  # the op that follows and that this call applies too, in both directions; one that the rule absorbs
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # what a rule works out only once

    def __getitem__(self, attr: str) -> Any:
        return self.node.attrs[attr]

    @cached_property
    def named(self) -> Mapping[str, int]:
        """The position of each input, by the op's argument that it fills."""
        return {role: position for position, role in enumerate(self.node.roles)}

    def given(self, inputs: Sequence[Tensor], role: str) -> Tensor | None:
        """The input that fills the argument `role`, or None when it was not given."""
        return inputs[self.named[role]] if role in self.named else None


@dataclass(frozen=True)
class Example:
    """One call of an op for the contract test: an ATen overload and its arguments, tensors as they are."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def _once_for_each_node(signature: Callable[[Any, Node], Signature]) -> Callable[[Any, Node], Signature]:
    """`Rule.signature` is asked for at every candidate of the search and on every rank; a node's never changes."""

    key = signature.__qualname__  # a subclass may ask its base class

    @wraps(signature)
    def remembered(rule: Any, node: Node) -> Signature:
        found: Signature | None = node.memo.get(key)
        if found is None:
            found = node.memo[key] = signature(rule, node)
        return found

    return remembered


class Rule:
    """An op that each rank can compute from what it reads. Subclasses give `signature` and `run`.

    `fresh`: the output is memory of its own, and the backward pass does not need it. `overwrites`: the op can put its
    output in place of its first input where `call.overwrite` allows that. `absorbs`: ops that the rule can apply to its
    own output where `call.then` asks for it.
    """

    fresh = False
    overwrites = False
    absorbs: frozenset[str] = frozenset()

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if "signature" in vars(cls):
            cls.signature = _once_for_each_node(cls.signature)  # type: ignore[assignment, method-assign]

    def signature(self, node: Node) -> Signature:
        """The node's index space. Raises PlanError for arguments that the rule does not support."""
        raise NotImplementedError

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        """The region of each input that the box `at` of index space needs, within the tensors' bounds."""
        dims = self.signature(node).inputs
        return tuple(along(type, names, at) for type, names in zip(node.input_types, dims, strict=True))

    def writes(self, node: Node, at: At) -> Region:
        """The region of the output that the box `at` of index space makes."""
        return along(node.type, self.signature(node).output, at)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        """The part of the output that `call` writes, in plain differentiable torch on local tensors."""
        raise NotImplementedError

    def forward(self, call: Call, inputs: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """The output, and what `backward` needs to be given back (None when no input wants a gradient)."""
        if not any(call.wanted):
            with torch.no_grad():
                return self.run(call, *inputs), None
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(want) for x, want in zip(inputs, call.wanted)]
            output = self.run(call, *leaves)
        if not output.requires_grad:
            return output.detach(), (None, [], output.dtype)
        # The edge and not the output itself, which may be freed where the op's gradient does not need it.
        edge = torch.autograd.graph.get_gradient_edge(output)
        return output.detach(), (edge, [x for x, want in zip(leaves, call.wanted) if want], output.dtype)

    def backward(self, call: Call, saved: Any, grad: Tensor) -> Grads:
        """This rank's contribution to the gradient of each input's region (None: not wanted, or zero)."""
        edge, leaves, dtype = saved
        if edge is None:
            return (None,) * len(call.wanted)
        grads = iter(torch.autograd.grad(edge, leaves, grad.to(dtype), allow_unused=True))
        return tuple(next(grads) if want else None for want in call.wanted)

    def example(self, rng: random.Random) -> Example:
        """A random call, for the contract test: small fp64 tensors, any arguments the op allows."""
        raise NotImplementedError


class AdditiveRule(Rule):
    """An op whose output is the sum of what each box of its first input adds, everything outside the box taken as zero.

    A rank can then compute on the block it owns while the halo is under way, and add what the halo boxes give: the
    block is never copied. The base box is the one of these that also adds what does not depend on the input.
    """

    def additive_dims(self, node: Node) -> tuple[int, ...]:
        """The dims of the first input along which boxes may be cut; along the others a box is all that is needed."""
        raise NotImplementedError

    def forward_box(self, call: Call, box: Region, inputs: Sequence[Tensor], base: bool) -> tuple[Region, Tensor, Any]:
        """What `inputs[0]`, the region `box` of the input, adds to the output: where, the values, and what to save.

        The base box adds to all that `call` writes; the others to what they reach of it, which may be empty.
        """
        raise NotImplementedError

    def backward_box(self, call: Call, saved: Any, grad: Tensor) -> Grads:
        """As `Rule.backward`, for one box; `grad` is that of the region the box adds to. Returns tensors of its own."""
        raise NotImplementedError


class StagedRule(Rule):
    """An op with values that must be combined over ranks on the way.

    `forward_stages` and `backward_stages` are generators: each `yield partial` gives the next of `reductions(node)`
    (of `grad_reductions(node)`) and receives it combined. They yield as often on every rank, also where its part is
    empty: there the partial is the neutral element. A rule that yields nothing in one direction starts with
    `yield from ()`.
    """

    def reductions(self, node: Node) -> tuple[Reduction, ...]:
        raise NotImplementedError

    def grad_reductions(self, node: Node) -> tuple[Reduction, ...]:
        return ()

    def forward_stages(self, call: Call, inputs: Sequence[Tensor]) -> Stages:
        """Returns what `Rule.forward` does."""
        raise NotImplementedError

    def backward_stages(self, call: Call, saved: Any, grad: Tensor) -> Stages:
        """Returns what `Rule.backward` does."""
        raise NotImplementedError


def along(type: TensorType, dims: Dims, at: At) -> Region:
    """The region of a value of `type` along whose dims the indices `dims` run, for the box `at`."""
    intervals = [
        (0, size) if name is None else at.get(name, (0, size)) for size, name in zip(type.shape, dims, strict=True)
    ]
    return Region(tuple(intervals))


def index_names(rank: int) -> tuple[str, ...]:
    """The names of the indices along the dims of a value with `rank` dims: n, c, then space.

    >>> index_names(4), index_names(3)
    (('n', 'c', 'h', 'w'), ('n', 'c', 'w'))
    """
    if rank <= 5:
        return ("n", "c")[:rank] + ("d", "h", "w")[5 - max(rank, 2) :]
    return ("n", "c") + tuple(f"x{dim}" for dim in range(2, rank))


RULES: dict[str, Rule] = {}


def register(rule: Rule, *ops: str) -> None:
    """Makes `rule` the rule of `ops`: names of ATen ops, with an overload (`max.other`) where overloads differ."""
    for op in ops:
        if op in RULES:
            raise ValueError(f"op {op} has two rules: {type(RULES[op]).__name__} and {type(rule).__name__}")
        RULES[op] = rule


def rule_of(node: Node) -> Rule | None:
    """The rule of the node's op, or None when there is none."""
    return RULES.get(node.target.removeprefix("aten.")) or RULES.get(node.op)


def torch_op(name: str) -> Any:
    """The function of `torch.ops.aten` by name."""
    return getattr(torch.ops.aten, name)


def cut(x: Tensor, dim: int, start: int, size: int) -> Tensor:
    """`size` points of `x` along `dim`, from `start` on; `x` itself where these are all.

    Autograd does not see that: its gradient of a cut is a copy into zeros, in no particular memory format.
    """
    return x if start == 0 and size == x.shape[dim] else x.narrow(dim, start, size)
