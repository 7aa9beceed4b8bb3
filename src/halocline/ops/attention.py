"""Attention: batch dims, heads and query rows may be split; of keys and values a head is read whole."""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import PlanError
from ..graph import Node
from ..region import Region
from .call_op import aten
from .intervals import replaced, scaled
from .pointwise import broadcast
from .rule import At, Call, Dims, Example, Rule, Signature, index_names, register


@dataclass(frozen=True)
class Heads:
    """Where the dims of an attention are: `rows` of the queries is dim -2; `group` query heads share a key head."""

    rows: str
    head: str | None
    group: int


def heads(node: Node) -> Heads:
    names = index_names(len(node.type.shape))
    group = node.type.shape[-3] // node.input_types[1].shape[-3] if node["enable_gqa"] else 1
    return Heads(names[-2], names[-3] if len(names) > 2 else None, group)


class Attention(Rule):
    """`scaled_dot_product_attention` of queries [*, L, E], keys [*, S, E] and values [*, S, V]."""

    def signature(self, node: Node) -> Signature:
        if node["dropout_p"]:
            raise PlanError(
                f"{node.where()} drops attention weights at random (dropout_p={node['dropout_p']}), which is not "
                "supported: set it to 0, or write the attention out with `nn.Dropout`."
            )
        found = heads(node)
        names, shape = index_names(len(node.type.shape)), node.type.shape
        indices = dict(zip(names[:-1], shape))
        if found.head and found.group > 1:  # query heads go with their key head
            indices[found.head] = shape[-3] // found.group
        inputs: list[Dims] = []
        for role, type in zip(node.roles, node.input_types):
            sizes = list(shape[:-2])
            if found.group > 1 and role in ("key", "value"):
                sizes[-1] //= found.group
            lead = broadcast(type.shape[:-2], sizes, names[:-2])
            rows = found.rows if role == "query" or (role == "attn_mask" and type.shape[-2] == shape[-2]) else None
            inputs.append((*lead, rows, None))
        return Signature(indices, tuple(inputs), (*names[:-1], None))

    def reads(self, node: Node, at: At) -> tuple[Region, ...]:
        found = heads(node)
        regions = list(super().reads(node, at))
        for position, (role, dims) in enumerate(zip(node.roles, self.signature(node).inputs)):
            if found.head in dims and found.head and role not in ("key", "value"):
                regions[position] = replaced(
                    regions[position], dims.index(found.head), scaled(at[found.head], found.group)
                )
            if role in ("key", "value") and node["is_causal"]:  # no query sees a key behind its own place
                seen = min(at[found.rows][1], node.input_types[position].shape[-2])
                regions[position] = replaced(regions[position], len(dims) - 2, (0, seen))
        return tuple(regions)

    def writes(self, node: Node, at: At) -> Region:
        found, region = heads(node), super().writes(node, at)
        if found.head is None:
            return region
        return replaced(region, len(node.type.shape) - 3, scaled(at[found.head], found.group))

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        query, key, value = inputs[:3]
        mask, first = call.given(inputs, "attn_mask"), call.writes.intervals[-2][0]
        causal = bool(call["is_causal"])
        if causal and first > 0:
            mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril(first)
            causal = False
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=call["scale"], enable_gqa=call["enable_gqa"]
        )

    def example(self, rng: random.Random) -> Example:
        lead = [rng.randint(1, 4) for _ in range(rng.randint(0, 2))]
        rows, keys, e, v = (rng.randint(1, 7) for _ in range(4))
        gqa = len(lead) == 2 and rng.random() < 0.2
        key_lead = lead
        if gqa:
            lead = [lead[0], lead[1] * rng.randint(1, 3)]

        def tensor(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64)

        causal = rng.random() < 0.4
        mask = None
        if not causal and rng.random() < 0.5:
            ones = [1 if rng.random() < 0.3 else size for size in lead[rng.randint(0, len(lead)) :]]
            mask = tensor(*ones, rng.choice((1, rows)), keys)
            if rng.random() < 0.5:
                mask = mask > -1
        scale = rng.choice((None, 0.3))
        return Example(
            aten("aten.scaled_dot_product_attention.default"),
            (tensor(*lead, rows, e), tensor(*key_lead, keys, e), tensor(*key_lead, keys, v), mask, 0.0, causal),
            {"scale": scale, "enable_gqa": gqa},
        )


register(Attention(), "scaled_dot_product_attention")
