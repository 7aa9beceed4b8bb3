"""Element-wise ops: every index of the output may be split; inputs broadcast as in torch."""

import random

import torch
from torch import Tensor

from ..graph import Node, TensorType
from .call_op import call_op
from .rule import Call, Dims, Example, Rule, Signature, index_names, register, torch_op

UNARY = (
    "abs neg exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sign sin cos tan tanh atan asinh sinh cosh "
    "erf erfc floor ceil round trunc frac sigmoid log_sigmoid relu relu6 leaky_relu elu selu celu gelu silu mish "
    "hardtanh hardswish hardsigmoid hardshrink softshrink softplus softsign tanhshrink threshold "
    "clamp clamp_min clamp_max nan_to_num isnan isinf isfinite logical_not bitwise_not "
    "clone contiguous detach detach_ alias lift_fresh_copy to _to_copy type_as zeros_like ones_like full_like"
).split()
BINARY = (
    "add sub rsub mul div floor_divide remainder fmod pow maximum minimum max.other min.other atan2 lerp copy "
    "eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor "
    "where addcmul addcdiv masked_fill"
).split()


def broadcast_dims(type: TensorType, output: TensorType) -> Dims:
    """The output's indices that run along the dims of an input which is broadcast to the output's shape."""
    names = index_names(len(output.shape))
    skipped = len(output.shape) - len(type.shape)
    return tuple(
        name if size == output.shape[dim + skipped] else None
        for dim, (size, name) in enumerate(zip(type.shape, names[skipped:]))
    )


class Pointwise(Rule):
    """An op whose output at a point depends on its inputs at that point only."""

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        inputs = tuple(broadcast_dims(type, node.type) for type in node.input_types)
        return Signature(dict(zip(names, node.type.shape)), inputs, names)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return call_op(call.node, inputs)

    def example(self, rng: random.Random) -> Example:
        shape = [rng.randint(1, 7) for _ in range(rng.randint(1, 5))]
        x = torch.randn(shape, dtype=torch.float64)
        if rng.random() < 0.4:
            op = rng.choice(("relu", "sigmoid", "tanh", "leaky_relu", "elu", "gelu", "silu", "hardswish", "exp", "abs"))
            return Example(torch_op(op).default, (x,))
        other = torch.randn([1 if rng.random() < 0.3 else size for size in shape][rng.randrange(len(shape)) :])
        args = [x, other.double()]
        rng.shuffle(args)
        return Example(
            getattr(torch_op(rng.choice(("add", "sub", "mul", "div", "maximum"))), "Tensor", None)
            or torch_op("maximum").default,
            tuple(args),
        )


register(Pointwise(), *UNARY, *BINARY)
