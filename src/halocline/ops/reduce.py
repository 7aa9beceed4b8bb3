"""Reductions over dims by sums: sum, mean, any, all, ..., and prod, whose dims stay whole."""

import random
from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from ..graph import Node
from .call_op import call_op
from .rule import (
    Call,
    Dims,
    Example,
    Reduction,
    Rule,
    Signature,
    StagedRule,
    Stages,
    index_names,
    register,
    torch_op,
)


def reduced_dims(node: Node) -> tuple[int, ...]:
    """The dims of the input that a reduction runs over, in order; none named means all."""
    rank = len(node.input_types[0].shape)
    dim = node.attrs.get("dim")
    if dim is None or dim == ():
        return tuple(range(rank))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(sorted(dim % rank for dim in dims)) if rank else ()


def reduced_signature(node: Node) -> Signature:
    """All indices of the input; those of the reduced dims are not in the output."""
    shape = node.input_types[0].shape
    names, dims = index_names(len(shape)), reduced_dims(node)
    kept: Dims = tuple(name for dim, name in enumerate(names) if dim not in dims)
    if node.attrs.get("keepdim"):
        kept = tuple(None if dim in dims else name for dim, name in enumerate(names))
    return Signature(dict(zip(names, shape)), (names, *((None,) * len(t.shape) for t in node.input_types[1:])), kept)


def reduced_indices(node: Node) -> tuple[str, ...]:
    """The indices that a reduction runs over."""
    names = index_names(len(node.input_types[0].shape))
    return tuple(names[dim] for dim in reduced_dims(node))


def reduced_size(node: Node) -> int:
    """How many elements each output is made of."""
    return prod(node.input_types[0].shape[dim] for dim in reduced_dims(node))


def kept_shape(call: Call) -> tuple[int, ...]:
    """The shape of this rank's part of the output, with every reduced dim as 1."""
    dims = reduced_dims(call.node)
    return tuple(1 if dim in dims else size for dim, size in enumerate(call.reads[0].shape))


def wide(dtype: torch.dtype) -> torch.dtype:
    """In what values of `dtype` are added up."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def reduction_example(rng: random.Random, name: str, **attrs: Any) -> Example:
    """A call of the reduction `name` (with its overload, `sum.dim_IntList`) of a random tensor."""
    target = torch_op(name.partition(".")[0])
    target = getattr(target, name.partition(".")[2] or "default")
    arguments = {argument.name: argument for argument in target._schema.arguments}
    x = torch.randn([rng.randint(1, 6) for _ in range(rng.randint(0 if "dim" not in arguments else 1, 5))])
    x = x.double() if rng.random() < 0.7 else x.double().round()  # with ties, and zeros
    if "keepdim" in arguments:
        attrs["keepdim"] = rng.random() < 0.5
    if "dim" in arguments:
        one = rng.randrange(-x.dim(), x.dim())
        some = rng.sample(range(x.dim()), rng.randint(1, x.dim()))
        attrs["dim"] = one if str(arguments["dim"].type) in ("int", "Optional[int]") else some
    return Example(target, (x,), attrs)


class Fold(StagedRule):
    """A reduction whose partial values, one for each output, are combined by `kind`.

    Subclasses say how: `partial` (dims kept), `finish`, and `gradient` of the rank's part of the input.
    """

    kind: Literal["sum", "max", "min"] = "sum"

    def signature(self, node: Node) -> Signature:
        return reduced_signature(node)

    def reductions(self, node: Node) -> tuple[Reduction, ...]:
        return (Reduction(self.kind, reduced_indices(node)),)

    def partial(self, call: Call, x: Tensor, dims: Sequence[int]) -> Tensor:
        """What this rank contributes; the neutral element where it has nothing."""
        raise NotImplementedError

    def finish(self, call: Call, total: Tensor) -> Tensor:
        return total

    def forward_stages(self, call: Call, inputs: Sequence[Tensor]) -> Stages:
        (x,) = inputs
        total = yield self.partial(call, x, reduced_dims(call.node))
        result = self.finish(call, total)
        saved = self.kept(x, result) if call.wanted[0] else None
        return result.to(call.node.type.dtype).reshape(call.writes.shape), saved

    def backward_stages(self, call: Call, saved: Any, grad: Tensor) -> Stages:
        yield from ()
        grad_x = self.gradient(call, saved, grad.reshape(kept_shape(call)))
        return (grad_x.to(call.node.input_types[0].dtype).expand(call.reads[0].shape).contiguous(),)

    def kept(self, x: Tensor, result: Tensor) -> Any:
        """What `gradient` needs of the rank's part of the input and of the result (dims kept)."""
        return x, result

    def gradient(self, call: Call, saved: Any, grad: Tensor) -> Tensor:
        """The gradient of the input, or what broadcasts to it, from that of the result with dims kept."""
        raise NotImplementedError


class Sum(Fold):
    """Sum and mean; those of a half-precision tensor are added up in fp32."""

    def partial(self, call: Call, x: Tensor, dims: Sequence[int]) -> Tensor:
        return x.sum(tuple(dims), keepdim=True, dtype=wide(call.node.type.dtype))

    def finish(self, call: Call, total: Tensor) -> Tensor:
        return total / reduced_size(call.node) if call.node.op == "mean" else total

    def kept(self, x: Tensor, result: Tensor) -> Any:
        return ()

    def gradient(self, call: Call, saved: Any, grad: Tensor) -> Tensor:
        return grad / reduced_size(call.node) if call.node.op == "mean" else grad

    def example(self, rng: random.Random) -> Example:
        name = rng.choice(("sum", "sum.dim_IntList", "mean", "mean.dim"))
        dtype = torch.float64 if rng.random() < 0.3 else None
        return reduction_example(rng, name, dtype=dtype)


class SumOfNumbers(Fold):
    """Sum that passes over NaN."""

    def partial(self, call: Call, x: Tensor, dims: Sequence[int]) -> Tensor:
        return x.nansum(tuple(dims), keepdim=True, dtype=wide(call.node.type.dtype))

    def gradient(self, call: Call, saved: Any, grad: Tensor) -> Tensor:
        return grad * saved[0].isnan().logical_not_()

    def example(self, rng: random.Random) -> Example:
        return reduction_example(rng, "nansum")


class Count(Fold):
    """Number of elements that are not zero."""

    def partial(self, call: Call, x: Tensor, dims: Sequence[int]) -> Tensor:
        return (x != 0).sum(tuple(dims), keepdim=True)

    def example(self, rng: random.Random) -> Example:
        return reduction_example(rng, rng.choice(("count_nonzero", "count_nonzero.dim_IntList")))


class AnyTrue(Fold):
    """Whether any element is true."""

    kind = "max"

    def partial(self, call: Call, x: Tensor, dims: Sequence[int]) -> Tensor:
        return (x != 0).sum(tuple(dims), keepdim=True).clamp_(max=1)

    def example(self, rng: random.Random) -> Example:
        return reduction_example(rng, rng.choice(("any", "any.dim", "any.dims")))


class AllTrue(Fold):
    """Whether all elements are true."""

    kind = "min"

    def partial(self, call: Call, x: Tensor, dims: Sequence[int]) -> Tensor:
        return 1 - (x == 0).sum(tuple(dims), keepdim=True).clamp_(max=1)

    def example(self, rng: random.Random) -> Example:
        return reduction_example(rng, rng.choice(("all", "all.dim", "all.dims")))


class WholeDims(Rule):
    """A reduction that has no reduction over ranks to match: its dims are read whole, the others may be split."""

    def signature(self, node: Node) -> Signature:
        whole = set(reduced_indices(node))
        every = reduced_signature(node)

        def left(dims: Dims) -> Dims:
            return tuple(None if name in whole else name for name in dims)

        indices = {name: size for name, size in every.indices.items() if name not in whole}
        return Signature(indices, tuple(map(left, every.inputs)), left(every.output))

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return call_op(call.node, inputs)

    def example(self, rng: random.Random) -> Example:
        return reduction_example(rng, rng.choice(("prod", "prod.dim_int")))


register(Sum(), "sum", "mean")
register(SumOfNumbers(), "nansum")
register(Count(), "count_nonzero")
register(AnyTrue(), "any")
register(AllTrue(), "all")
register(WholeDims(), "prod", "nanmean")
