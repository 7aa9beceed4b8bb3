"""Element-wise ops: every index of the output may be split; inputs broadcast as in torch."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import PlanError
from ..graph import Node, TensorType
from ..region import Region
from .call_op import aten, call_op
from .intervals import nothing
from .rule import At, Call, Dims, Example, Rule, Signature, index_names, register, torch_op

UNARY = (
    "abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sign sgn "
    "signbit sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh arcsin arccos arctan arcsinh arccosh arctanh "
    "sinc erf erfc erfinv lgamma digamma logit floor ceil round trunc fix frac deg2rad rad2deg angle i0 "
    "special_expit special_erf special_erfc special_erfinv special_expm1 special_exp2 special_log1p special_sinc "
    "special_logit special_gammaln special_digamma special_psi special_entr special_ndtr special_log_ndtr "
    "special_round sigmoid log_sigmoid relu6 leaky_relu elu selu celu gelu silu mish hardtanh hardswish "
    "hardsigmoid hardshrink softshrink softplus threshold rrelu clamp clamp_min clamp_max clip nan_to_num isnan isinf "
    "isfinite isneginf isposinf logical_not bitwise_not "
    "clone contiguous detach detach_ alias lift lift_fresh lift_fresh_copy to _to_copy"
).split()
BINARY = (
    "sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power maximum "
    "minimum max.other min.other fmax fmin atan2 arctan2 hypot lerp logaddexp logaddexp2 xlogy special_xlogy heaviside "
    "copysign ldexp addcmul addcdiv _prelu_kernel "
    "eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose "
    "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift "
    "__and__ __or__ __xor__ __lshift__ __rshift__ gcd lcm "
    "where.self where.ScalarOther where.ScalarSelf where.Scalar masked_fill"
).split()

# What examples draw from, where not every number will do.
UNIT = "asin acos atanh arcsin arccos arctanh erfinv logit special_erfinv special_logit".split()
POSITIVE = "log log2 log10 log1p sqrt rsqrt lgamma digamma pow float_power xlogy special_xlogy special_entr".split()
WHOLE = "eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose max.other min.other".split()
BITS = (
    "bitwise_not bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift "
    "__and__ __or__ __xor__ __lshift__ __rshift__ gcd lcm"
).split()
NO_GRADIENT = ("floor_divide", "remainder", "heaviside", "lift", "lift_fresh")


def broadcast(shape: Sequence[int], sizes: Sequence[int], names: Sequence[str]) -> Dims:
    """The indices of a tensor of `shape` that is broadcast to dims of `sizes` along which `names` run."""
    skipped = len(sizes) - len(shape)
    return tuple(name if size == whole else None for size, whole, name in zip(shape, sizes[skipped:], names[skipped:]))


def broadcast_dims(type: TensorType, output: TensorType) -> Dims:
    """The output's indices that run along the dims of an input which is broadcast to the output's shape."""
    return broadcast(type.shape, output.shape, index_names(len(output.shape)))


class Pointwise(Rule):
    """An op whose output at a point depends on its inputs at that point only."""

    def signature(self, node: Node) -> Signature:
        if node.attrs.get("training") and node.op == "rrelu":
            raise PlanError(f"{node.where()} draws its slopes at random when training, which is not supported.")
        names = index_names(len(node.type.shape))
        inputs = tuple(broadcast_dims(type, node.type) for type in node.input_types)
        return Signature(dict(zip(names, node.type.shape)), inputs, names)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return call_op(call.node, inputs)

    def example(self, rng: random.Random) -> Example:
        op = rng.choice([op for op in UNARY + BINARY if op != "detach_"])
        name, _, overload = op.partition(".")
        packet = torch_op(name)
        target = getattr(packet, overload or rng.choice(_overloads(packet)))
        shape = [rng.choice((1, 2, 3, 4, 5, 7)) for _ in range(rng.randint(0, 5))]
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in target._schema.arguments:
            value = _argument(rng, op, argument, shape)
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        if name in ("clamp", "clip") and args[1:] == [None, None]:
            args[1] = 0.5 if target._overloadname == "default" else torch.randn(shape, dtype=torch.float64)
        return Example(target, tuple(args), kwargs)


def _overloads(packet: Any) -> list[str]:
    """The overloads an example may call: out of place, and not conversions to a device or to another tensor's type."""
    found = []
    for name in packet.overloads():
        arguments = getattr(packet, name)._schema.arguments
        tensors = [argument for argument in arguments if "Tensor" in str(argument.type)]
        alone = all(str(argument.type) in ("Tensor", "Optional[Tensor]") for argument in tensors)
        if tensors and alone and not any(argument.is_write or argument.is_out for argument in tensors):
            found.append(name)
    return [name for name in found if not name.startswith(("prim", "other", "device", "dtype_layout"))]


def _argument(rng: random.Random, op: str, argument: Any, shape: list[int]) -> Any:
    name, kind = argument.name, str(argument.type)
    if name == "dtype":
        return rng.choice((torch.float64, torch.float32))
    if name in ("approximate", "rounding_mode"):
        return rng.choice(("none", "tanh") if name == "approximate" else (None, "floor", "trunc"))
    if "Optional" in kind and rng.random() < 0.4:
        return None
    if "Tensor" in kind:
        return _tensor(rng, op, name, shape)
    if "number" in kind and name not in ("lower", "upper"):
        if op in (*BITS, *NO_GRADIENT):
            return rng.randint(1, 5)
        return rng.uniform(-1, 0) if name.startswith("min") else rng.uniform(0.5, 2)
    return rng.randint(0, 2) if name == "decimals" else argument.default_value


def _tensor(rng: random.Random, op: str, name: str, shape: list[int]) -> Tensor:
    """A tensor of `shape`, or of one that is broadcast to it, with numbers that `op` takes."""
    if name == "value":
        shape = []
    elif op not in UNARY and (op, name) != ("_prelu_kernel", "self") and rng.random() < 0.5:
        shape = [1 if rng.random() < 0.3 else size for size in shape[rng.randint(0, len(shape)) :]]
    if name in ("condition", "mask"):
        return torch.randn(shape) > 0
    if op in (*BITS, *NO_GRADIENT):
        return torch.randint(1, 8, shape)
    if op in WHOLE or op.startswith("logical"):
        return torch.randint(0, 3, shape).double()
    x = torch.randn(shape, dtype=torch.float64)
    if op.startswith(("is", "nan")):
        return torch.where(x > 1, torch.inf, torch.where(x < -1, -torch.inf, torch.where(x > 0.5, torch.nan, x)))
    if op in ("acosh", "arccosh"):
        return 1.5 + x.abs()
    if op in UNIT:
        return x.sigmoid()
    return x.abs() + 0.1 if op in POSITIVE else x


class Prelu(Pointwise):
    """Leaky ReLU whose slope is a parameter, for all channels or for each."""

    def signature(self, node: Node) -> Signature:
        x, weight = node.input_types
        names = index_names(len(x.shape))
        slope = names[1] if weight.numel > 1 else None
        return Signature(dict(zip(names, x.shape)), (names, (slope,) * len(weight.shape)), names)

    def example(self, rng: random.Random) -> Example:
        x = torch.randn([rng.randint(1, 5) for _ in range(rng.randint(1, 5))], dtype=torch.float64)
        slopes = x.shape[1] if x.dim() > 1 and rng.random() < 0.6 else 1
        return Example(aten("aten.prelu.default"), (x, torch.randn(slopes, dtype=torch.float64)))


class Cast(Pointwise):
    """As the dtype of another tensor, of which nothing is read."""

    def signature(self, node: Node) -> Signature:
        x, other = node.input_types
        names = index_names(len(x.shape))
        return Signature(dict(zip(names, x.shape)), (names, (None,) * len(other.shape)), names)

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        return super().reads(node, at)[0], nothing(node.input_types[1])

    def example(self, rng: random.Random) -> Example:
        shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 4))]
        x = torch.randn(shape, dtype=rng.choice((torch.float32, torch.float64)))
        other = torch.ones(2, 3, dtype=rng.choice((torch.int64, torch.float64)))
        return Example(rng.choice((aten("aten.type_as.default"), aten("aten.to.other"))), (x, other))


register(Pointwise(), *UNARY, *BINARY)
register(Prelu(), "prelu")
register(Cast(), "type_as", "to.other")
