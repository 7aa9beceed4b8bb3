"""Batch normalisation, with the statistics of the mini-batch, of each sample group, or of each rank's own block."""

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import PlanError
from ..graph import Node
from .channels import (
    Standard,
    gradient_sums,
    masked_gradient_sums,
    standardised,
    statistics_dtype,
    through_statistics,
)
from .moments import local_moments
from .rule import Call, Example, Reduction, Signature, StagedRule, Stages, index_names, register, torch_op

STATISTICS = ("global", "spatial", "local")


@dataclass(frozen=True)
class Saved:
    """What the backward pass needs: the input itself, and the statistics [C]."""

    x: Tensor
    weight: Tensor
    standard: Standard
    output: Tensor | None  # of the ReLU that followed


class BatchNorm(StagedRule):
    """Moments of each part, merged over the ranks by Chan et al. (1979); then each rank normalises its part.

    The attribute `statistics` (set by a plan, Dryden et al. 2019) says over which ranks: `global`, the default, gives
    what one process gives; `spatial` merges over the ranks that share samples; `local` does not merge.
    Running statistics end equal on all ranks: of several groups they take the mean, weighted by count. Given the number
    of batches so far (`momentum=None` in the module), they are the mean over all of them.
    """

    fresh = True
    absorbs = frozenset({"relu"})

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        if _statistics(node) not in STATISTICS:
            raise PlanError(
                f"{node.where()}: batch norm statistics {node['statistics']!r} are not known; "
                f"there are {', '.join(STATISTICS)}"
            )
        # Running statistics are updated where they lie, whole on every rank: each must know all channels.
        channel = None if _updates(node) else "c"
        dims = (names[0], channel, *names[2:])
        indices = {name: size for name, size in zip(dims, node.type.shape) if name}
        others = tuple((channel,) if type.shape else () for type in node.input_types[1:])
        return Signature(indices, (dims, *others), dims)

    def reductions(self, node: Node) -> tuple[Reduction, ...]:
        if not node["training"]:
            return ()
        merged, others = _over(node)
        reductions = (Reduction("moments", merged),) if merged else ()
        return (*reductions, Reduction("sum", others)) if others and _updates(node) else reductions

    def grad_reductions(self, node: Node) -> tuple[Reduction, ...]:
        merged, _ = _over(node)
        return (Reduction("sum", merged),) if merged and node["training"] else ()

    def forward_stages(self, call: Call, inputs: Sequence[Tensor]) -> Stages:
        x = inputs[0]
        dtype = statistics_dtype(x)
        running = [call.given(inputs, "running_mean"), call.given(inputs, "running_var")]
        if call["training"]:
            moments = local_moments(x, [dim for dim in range(x.dim()) if dim != 1]).flatten(1)
            if self._taken_of(call)[0]:
                moments = yield moments
            _, mean, squares = moments.unbind()
            variance = squares / self._taken_of(call)[2]
            if running[0] is not None and running[1] is not None:
                batches = call.given(inputs, "num_batches_tracked")
                momentum = call["momentum"] if batches is None else 1 / float(batches)
                yield from self._update(call, running[0], running[1], moments, momentum)
        else:
            if running[0] is None or running[1] is None:
                raise PlanError(f"{call.node.where()}: batch norm in evaluation mode has no running statistics to use")
            mean, variance = running[0].clone(), running[1].clone()
        mean, variance = mean.to(dtype), variance.to(dtype)
        weight, bias = call.given(inputs, "weight"), call.given(inputs, "bias")
        weight = torch.ones_like(mean) if weight is None else weight.to(dtype)
        bias = torch.zeros_like(mean) if bias is None else bias.to(dtype)
        standard, relu = Standard(mean, variance, call["eps"]), call.then == "relu"
        output = standardised(x, standard, weight, bias, relu)
        if not any(call.wanted):
            return output, None
        return output, Saved(x, weight, standard, output if relu else None)

    def _taken_of(self, call: Call) -> tuple[tuple[str, ...], tuple[str, ...], int]:
        """What `_over` says, and how many elements of a channel the statistics are taken of (at least 1)."""
        if "taken of" not in call.memo:
            merged, others = _over(call.node)
            sizes = dict(zip(index_names(len(call.node.type.shape)), call.node.type.shape))
            count = prod([sizes[name] for name in merged] + [call.at[name][1] - call.at[name][0] for name in others])
            call.memo["taken of"] = merged, others, max(1, count)
        found: tuple[tuple[str, ...], tuple[str, ...], int] = call.memo["taken of"]
        return found

    def _update(
        self, call: Call, running_mean: Tensor, running_var: Tensor, moments: Tensor, momentum: float
    ) -> Generator[Tensor, Tensor, None]:
        """Moves the running statistics, in place, by `momentum` towards those of the mini-batch."""
        _, others, elements = self._taken_of(call)
        count, mean, squares = moments.unbind()
        unbiased = squares / max(1, elements - 1)
        if others:
            weighted = yield torch.stack([count, count * mean, count * unbiased])
            total = weighted[0].clamp(min=1)
            mean, unbiased = weighted[1] / total, weighted[2] / total
        for buffer, value in ((running_mean, mean), (running_var, unbiased)):
            buffer.lerp_(value.to(buffer.dtype), momentum)

    def backward_stages(self, call: Call, saved: Any, grad: Tensor) -> Stages:
        x, standard, training, masks = saved.x, saved.standard, call["training"], saved.output is not None
        scale = saved.weight * standard.rstd
        if saved.output is not None:
            grad, sums = masked_gradient_sums(grad, saved.output, x, standard)
        elif training or any(call.wanted[1:]):
            sums = gradient_sums(grad, x, standard)
        else:
            sums = scale.new_zeros(2, *scale.shape)
        del saved  # with the output: from here on it takes memory for nothing
        total = sums
        if training and self._taken_of(call)[0]:
            total = yield sums.clone()
        grads: list[Tensor | None] = [None] * len(call.wanted)
        if call.wanted[0] and training:
            shift, slope = (total * (scale * (-1 / self._taken_of(call)[2]))).unbind()
            grads[0] = through_statistics(grad, x, standard, scale, slope, shift, masks)
        elif call.wanted[0]:
            grads[0] = grad * scale.to(grad.dtype).view(1, -1, *(1,) * (x.dim() - 2))
        for role, value in (("weight", sums[1]), ("bias", sums[0])):
            if role in call.named and call.wanted[call.named[role]]:
                grads[call.named[role]] = value.to(call.node.input_types[call.named[role]].dtype)
        return tuple(grads)

    def example(self, rng: random.Random) -> Example:
        shape = [rng.randint(1, 5), rng.randint(1, 4), *(rng.randint(1, 7) for _ in range(rng.randint(0, 3)))]
        if shape[0] * len(shape) == 2 or all(size == 1 for size in (shape[0], *shape[2:])):
            shape[0] = 2
        x = torch.randn(shape, dtype=torch.float64) * rng.choice((1, 1, 5)) + rng.choice((0, 0, 30))

        def channels(given: float) -> Tensor | None:
            return torch.rand(shape[1], dtype=torch.float64) + 0.5 if rng.random() < given else None

        mean = channels(0.5)
        variance = None if mean is None else channels(1)
        if rng.random() < 0.3 and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        # Evaluation mode has tests of its own: torch gives running statistics that are not updated no gradient.
        momentum, eps = rng.choice((0.1, 1.0)), rng.choice((1e-5, 1e-3))
        args = (x, channels(0.8), channels(0.8), mean, variance, True, momentum, eps, True)
        return Example(torch_op("batch_norm").default, args)


def _statistics(node: Node) -> str:
    return str(node.attrs.get("statistics", "global"))


def _updates(node: Node) -> bool:
    return bool(node["training"]) and node.position("running_mean") is not None


def _over(node: Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The indices over which moments are merged, and the others that tell apart the groups they are merged in."""
    sample, _, *space = index_names(len(node.type.shape))
    everything = (sample, *space)
    merged = {"global": everything, "spatial": tuple(space), "local": ()}[_statistics(node)]
    return merged, tuple(name for name in everything if name not in merged)


register(BatchNorm(), "batch_norm")
