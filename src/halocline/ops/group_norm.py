"""Group and instance normalisation: statistics of each sample and group of channels, over space that may be split."""

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import PlanError
from ..graph import Node
from .channels import Standard, dense_like, gradient_sums, standardised, statistics_dtype, through_statistics
from .moments import local_moments, merge_moments
from .rule import Call, Example, Reduction, Signature, StagedRule, Stages, index_names, register, torch_op


def _for_kernel(x: Tensor) -> Tensor:
    """`x` in the memory order that torch's kernel takes its strides for, which dims of size 1 make ambiguous."""
    x = dense_like(x, x)
    order = torch._prims_common.suggest_memory_format(x)
    return x if x.is_contiguous(memory_format=order) else x.contiguous(memory_format=order)


@dataclass(frozen=True)
class Saved:
    """What the backward pass needs: the input itself, its scale [1, C], and the statistics [N, C]."""

    x: Tensor
    weight: Tensor
    standard: Standard


class GroupNorm(StagedRule):
    """Moments of each sample and group, merged over the ranks that share its space by Chan et al. (1979).

    Channels may be split where each is a group of its own: in instance norm. Where a rank holds all space and channels
    it uses torch's kernel for group norm, and passes on only what ranks without a part expect.
    """

    def groups(self, node: Node) -> int:
        return int(node["num_groups"])

    def from_input(self, node: Node) -> bool:
        """Whether the statistics are those of the input (else running statistics)."""
        return True

    def updates(self, node: Node) -> bool:
        """Whether running statistics are moved towards those of the input."""
        return False

    def is_whole(self, call: Call) -> bool:
        """Whether torch's kernel computes this rank's part."""
        return call.reads[0].shape[1:] == call.node.type.shape[1:] and call.reads[0].size > 0

    def signature(self, node: Node) -> Signature:
        names, shape = index_names(len(node.type.shape)), node.type.shape
        # Running statistics are updated where they lie, whole on every rank: each must know all channels.
        channel = "c" if self.groups(node) == shape[1] and not self.updates(node) else None
        dims = (names[0], channel, *names[2:])
        indices = {name: size for name, size in zip(dims, shape) if name}
        return Signature(indices, (dims, *((channel,) for _ in node.inputs[1:])), dims)

    def reductions(self, node: Node) -> tuple[Reduction, ...]:
        sample, _, *space = index_names(len(node.type.shape))
        merged = (Reduction("moments", tuple(space)),) if self.from_input(node) else ()
        return (*merged, Reduction("sum", (sample,))) if self.updates(node) else merged

    def grad_reductions(self, node: Node) -> tuple[Reduction, ...]:
        _, _, *space = index_names(len(node.type.shape))
        return (Reduction("sum", tuple(space)),) if self.from_input(node) else ()

    def forward_stages(self, call: Call, inputs: Sequence[Tensor]) -> Stages:
        x = inputs[0]
        if self.is_whole(call):
            return (yield from self._forward_whole(call, inputs))
        dtype = statistics_dtype(x)
        if self.from_input(call.node):
            of_channels = local_moments(x, range(2, x.dim())).flatten(2).unflatten(2, (-1, self._channels(call)))
            moments = yield merge_moments(of_channels.movedim(3, 0))
            count, mean, squares = moments.unbind()
            variance = squares / count.clamp(min=1)
            if self.updates(call.node):
                yield from self._update(call, inputs, moments)
            mean, variance = (values.repeat_interleave(self._channels(call), 1) for values in (mean, variance))
        else:
            running = (self._running(call, inputs, role) for role in ("running_mean", "running_var"))
            mean, variance = (values.expand(len(x), -1) for values in running)
        mean, variance = mean.to(dtype), variance.to(dtype)
        weight, bias = call.given(inputs, "weight"), call.given(inputs, "bias")
        weight = mean.new_ones(1, x.shape[1]) if weight is None else weight[None].to(dtype)
        bias = mean.new_zeros(1, x.shape[1]) if bias is None else bias[None].to(dtype)
        standard = Standard(mean, variance, call["eps"])
        output = standardised(x, standard, weight.expand_as(mean), bias.expand_as(mean))
        return output, Saved(x, weight, standard) if any(call.wanted) else None

    def _channels(self, call: Call) -> int:
        """How many channels make a group."""
        return int(call.node.type.shape[1]) // self.groups(call.node)

    def _running(self, call: Call, inputs: Sequence[Tensor], role: str) -> Tensor:
        values = call.given(inputs, role)
        if values is None:
            raise PlanError(f"{call.node.where()}: {call.node.op} is to use running statistics, but has none")
        return values.clone()[None]

    def _update(self, call: Call, inputs: Sequence[Tensor], moments: Tensor) -> Generator[Tensor, Tensor, None]:
        """Moves the running statistics, in place, by `momentum` towards the mean over all samples of theirs."""
        count, mean, squares = moments
        unbiased = squares / (count - 1).clamp(min=1)
        sums = yield torch.stack([mean.sum(0), unbiased.sum(0)])
        momentum, samples = call["momentum"], call.node.type.shape[0]
        for role, value in zip(("running_mean", "running_var"), sums / samples):
            buffer = call.given(inputs, role)
            if buffer is not None:
                buffer.copy_(buffer * (1 - momentum) + momentum * value)

    def _forward_whole(self, call: Call, inputs: Sequence[Tensor]) -> Stages:
        x, weight, bias = _for_kernel(inputs[0]), call.given(inputs, "weight"), call.given(inputs, "bias")
        groups = self.groups(call.node)
        sizes = (*x.shape[:2], prod(x.shape[2:]), groups)
        yield x.new_zeros(3, x.shape[0], groups, dtype=torch.float64)
        output, mean, rstd = torch_op("native_group_norm")(x, weight, bias, *sizes, call["eps"])
        return output, (x, weight, mean, rstd, sizes) if any(call.wanted) else None

    def _backward_whole(self, call: Call, saved: Any, grad: Tensor) -> Stages:
        x, weight, mean, rstd, sizes = saved
        yield x.new_zeros(2, *mean.shape, dtype=statistics_dtype(x))
        weight = x.new_ones(x.shape[1], dtype=mean.dtype) if weight is None else weight
        wanted = [role in call.named and call.wanted[call.named[role]] for role in ("input", "weight", "bias")]
        backward = torch_op("native_group_norm_backward")
        found = backward(dense_like(grad, x), x, mean, rstd, weight, *sizes, wanted)
        by_role = dict(zip(("input", "weight", "bias"), found))
        return tuple(by_role[role] if want else None for role, want in zip(call.node.roles, call.wanted))

    def backward_stages(self, call: Call, saved: Any, grad: Tensor) -> Stages:
        if self.is_whole(call):
            return (yield from self._backward_whole(call, saved, grad))
        x, standard = saved.x, saved.standard
        mean, rstd = standard.mean, standard.rstd
        sums = gradient_sums(grad, x, standard)
        channels = self._channels(call)
        slope = shift = torch.zeros_like(mean)
        if self.from_input(call.node):
            grouped = (sums * saved.weight).unflatten(2, (-1, channels)).sum(3)
            total = yield grouped
            count = channels * prod(call.node.type.shape[2:])
            shift, slope = (total / -count).repeat_interleave(channels, 2) * rstd
        grads: list[Tensor | None] = [None] * len(call.wanted)
        if call.wanted[0]:
            scale = (saved.weight * rstd).expand_as(mean)
            grads[0] = through_statistics(grad, x, standard, scale, slope, shift)
        for role, value in (("weight", sums[1]), ("bias", sums[0])):
            if role in call.named and call.wanted[call.named[role]]:
                grads[call.named[role]] = value.sum(0).to(call.node.input_types[call.named[role]].dtype)
        return tuple(grads)

    def example(self, rng: random.Random) -> Example:
        groups = rng.randint(1, 3)
        x = normalised_example(rng, groups * rng.randint(1, 3))
        weight, bias = (_channel_values(rng, x.shape[1]) for _ in range(2))
        bias = None if weight is None else bias  # torch's own backward fails on a bias alone
        return Example(torch_op("group_norm").default, (x, groups, weight, bias, rng.choice((1e-5, 1e-2)), True))


class InstanceNorm(GroupNorm):
    """Each channel is a group of its own; running statistics take the mean over samples."""

    def groups(self, node: Node) -> int:
        return int(node.type.shape[1])

    def is_whole(self, call: Call) -> bool:
        return False

    def from_input(self, node: Node) -> bool:
        return bool(node["use_input_stats"])

    def updates(self, node: Node) -> bool:
        return bool(node["use_input_stats"]) and node.position("running_mean") is not None

    def example(self, rng: random.Random) -> Example:
        """Statistics of the input: running ones that are not updated get no gradient from torch."""
        x = normalised_example(rng, rng.randint(1, 4))
        if x.dim() == 2 or prod(x.shape[2:]) == 1:
            x = torch.randn(*x.shape[:2], 3, dtype=torch.float64)
        weight, bias = (_channel_values(rng, x.shape[1]) for _ in range(2))
        running = [torch.rand(x.shape[1], dtype=torch.float64) if weight is not None else None for _ in range(2)]
        args = (x, weight, bias, *running, True, rng.choice((0.1, 1.0)), rng.choice((1e-5, 1e-2)), True)
        return Example(torch_op("instance_norm").default, args)


def normalised_example(rng: random.Random, channels: int) -> Tensor:
    """A random input [N, C, ...] with a mean that may be large, in a random memory format."""
    x = torch.randn(rng.randint(1, 4), channels, *(rng.randint(1, 6) for _ in range(rng.randint(0, 3))))
    x = x.double() * rng.choice((1, 5)) + rng.choice((0, 0, 30))
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 and rng.random() < 0.4 else x


def _channel_values(rng: random.Random, channels: int) -> Tensor | None:
    return torch.rand(channels, dtype=torch.float64) + 0.5 if rng.random() < 0.7 else None


register(GroupNorm(), "group_norm")
register(InstanceNorm(), "instance_norm")
