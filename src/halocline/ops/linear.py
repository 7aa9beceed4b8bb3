"""Linear maps with weights: all dims of the entries and the output features may be split."""

import random

import torch
import torch.nn.functional as F
from torch import Tensor

from ..graph import Node
from .call_op import aten, call_op
from .rule import Call, Dims, Example, Rule, Signature, index_names, register


class Linear(Rule):
    """`linear` [*, C] x [F, C] and `bilinear` [*, C], [*, D] x [F, C, D], with or without a bias [F]."""

    def signature(self, node: Node) -> Signature:
        weight = node.input_types[node.roles.index("weight")].shape
        # Torch also takes a weight [C], which gives no dim of features.
        features: Dims = ("f",) if len(weight) > 1 else ()
        lead = index_names(len(node.type.shape))[: len(node.type.shape) - len(features)]
        known: dict[str, Dims] = {"weight": (*features, *(None,) * (len(weight) - len(features))), "bias": features}
        inputs = tuple(known.get(role, (*lead, None)) for role in node.roles)
        output = (*lead, *features)
        return Signature({name: size for name, size in zip(output, node.type.shape) if name}, inputs, output)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return call_op(call.node, inputs)

    def example(self, rng: random.Random) -> Example:
        lead = [rng.randint(1, 5) for _ in range(rng.randint(0, 3))]
        c, d, f = (rng.randint(1, 6) for _ in range(3))
        x, y = (torch.randn(*lead, size, dtype=torch.float64) for size in (c, d))
        bias = torch.randn(f, dtype=torch.float64) if rng.random() < 0.6 else None
        if rng.random() < 0.3:
            return Example(aten("aten.bilinear.default"), (x, y, torch.randn(f, c, d, dtype=torch.float64), bias))
        if rng.random() < 0.1:
            return Example(aten("aten.linear.default"), (x, torch.randn(c, dtype=torch.float64)))
        return Example(aten("aten.linear.default"), (x, torch.randn(f, c, dtype=torch.float64), bias))


class Embedding(Rule):
    """Rows of a table [V, F], all of which are read; its columns `f` and all dims of the numbers may be split."""

    def signature(self, node: Node) -> Signature:
        lead: Dims = index_names(len(node.type.shape))[:-1]
        if node["scale_grad_by_freq"]:  # counts how often a number occurs among all
            lead = (None,) * len(lead)
        output = (*lead, "f")
        return Signature(
            {name: size for name, size in zip(output, node.type.shape) if name}, ((None, "f"), lead), output
        )

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        table, numbers = inputs
        padding = call["padding_idx"] if call["padding_idx"] >= 0 else None
        # Gradients are summed over ranks as dense tensors, so `sparse` is left out.
        return F.embedding(numbers, table, padding, scale_grad_by_freq=call["scale_grad_by_freq"])

    def example(self, rng: random.Random) -> Example:
        table = torch.randn(rng.randint(1, 6), rng.randint(1, 5), dtype=torch.float64)
        numbers = torch.randint(table.shape[0], [rng.randint(1, 5) for _ in range(rng.randint(0, 3))])
        padding = rng.choice((-1, rng.randrange(table.shape[0])))
        return Example(aten("aten.embedding.default"), (table, numbers, padding, rng.random() < 0.2))


register(Linear(), "linear", "bilinear")
register(Embedding(), "embedding")
