"""Random numbers that depend on where an element lies in the whole tensor, not on who draws it (see `dropout`).

Stochastic depth, noise layers and variational nets draw with these inside their forward pass. Every split over any
number of ranks draws the same numbers; they are not those of torch's own generator.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import PlanError
from ..graph import Node
from .dropout import mask_key, place_hash
from .pointwise import broadcast_dims
from .rule import Call, Rule, Signature, index_names, register

# How many bits fill the interval from 0 to 1 evenly, without ever rounding up to 1.
BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
Draw = Callable[[Call, Sequence[Tensor]], Tensor]


class Random(Rule):
    """An op that draws every element of its output by itself, such as `rand`, `randn_like` or `bernoulli`.

    What it is given (probabilities, means, or only a shape) is read where it is drawn. No gradient passes through.
    """

    def signature(self, node: Node) -> Signature:
        if node.target.removeprefix("aten.") not in DRAWN:
            raise PlanError(f"{node.where()}: this form of `{node.target}` is not known. Draw outside the model.")
        names = index_names(len(node.type.shape))
        inputs = tuple(broadcast_dims(type, node.type) for type in node.input_types)
        return Signature(dict(zip(names, node.type.shape)), inputs, names)

    @torch.no_grad()
    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        drawn = DRAWN[call.node.target.removeprefix("aten.")](call, inputs)
        return drawn.to(call.node.type.dtype)


def _hashes(call: Call, inputs: Sequence[Tensor], number: int) -> Tensor:
    """Whole numbers of 32 bits in fp64, independent for every place and `number`."""
    device = inputs[0].device if inputs else torch.device(call.node.attrs.get("device") or "cpu")
    key = mask_key(call.noise, f"{call.node.name}/{number}")
    return place_hash(call.writes, call.node.type.shape, key, device).double() + 2.0**31


def uniform(call: Call, inputs: Sequence[Tensor]) -> Tensor:
    """Fp64 numbers from 0 to 1, not 1, that the output's dtype holds exactly."""
    bits = BITS.get(call.node.type.dtype, 53)
    whole = _hashes(call, inputs, 0)
    if bits > 32:
        whole = whole * 2.0 ** (bits - 32) + torch.floor(_hashes(call, inputs, 1) / 2.0 ** (64 - bits))
    else:
        whole = torch.floor(whole / 2.0 ** (32 - bits))
    return whole / 2.0**bits


def normal(call: Call, inputs: Sequence[Tensor]) -> Tensor:
    """Fp64 numbers of mean 0 and variance 1, by Box and Muller (1958)."""
    radius = ((_hashes(call, inputs, 0) + 0.5) / 2.0**32).log_().mul_(-2).sqrt_()
    return radius * (_hashes(call, inputs, 1) * (2 * math.pi / 2.0**32)).cos_()


def _below(call: Call, inputs: Sequence[Tensor], p: Tensor | float) -> Tensor:
    return uniform(call, inputs) < p


def _scaled_normal(call: Call, inputs: Sequence[Tensor]) -> Tensor:
    mean, std = (_number_or_input(call, inputs, name) for name in ("mean", "std"))
    return normal(call, inputs) * std + mean


def _number_or_input(call: Call, inputs: Sequence[Tensor], name: str) -> Tensor | float:
    given = call.given(inputs, name)
    return call[name] if given is None else given


def _whole_number(call: Call, inputs: Sequence[Tensor]) -> Tensor:
    low, high = call.node.attrs.get("low") or 0, call["high"]
    return torch.floor(uniform(call, inputs) * (high - low)) + low


DRAWN: dict[str, Draw] = {
    "rand.default": uniform,
    "rand_like.default": uniform,
    "randn.default": normal,
    "randn_like.default": normal,
    "bernoulli.default": lambda call, inputs: _below(call, inputs, inputs[0]),
    "bernoulli.p": lambda call, inputs: _below(call, inputs, call["p"]),
    "bernoulli.Tensor": lambda call, inputs: _below(call, inputs, inputs[1]),
    "uniform.default": lambda call, inputs: uniform(call, inputs) * (call["to"] - call["from"]) + call["from"],
    "exponential.default": lambda call, inputs: -torch.log1p(-uniform(call, inputs)) / call["lambd"],
    "normal_functional.default": _scaled_normal,
    "normal.Tensor_float": _scaled_normal,
    "normal.float_Tensor": _scaled_normal,
    "normal.Tensor_Tensor": _scaled_normal,
    "normal.float_float": _scaled_normal,
    "randint.default": _whole_number,
    "randint.low": _whole_number,
    "randint_like.default": _whole_number,
    "randint_like.low_dtype": _whole_number,
}

register(Random(), *dict.fromkeys(target.partition(".")[0] for target in DRAWN))
