"""Products of matrices: rows, columns and batch dims may be split; what is summed over is read whole."""

import random
import re
from collections import Counter

import torch
from torch import Tensor

from ..graph import Node
from .call_op import aten, call_op
from .pointwise import broadcast, broadcast_dims
from .rule import Call, Dims, Example, Rule, Signature, index_names, register

MATRIX = "matmul mm bmm mv dot vdot outer ger inner linalg_matmul addmm addmv addr addbmm baddbmm tensordot".split()


class MatMul(Rule):
    """Products of two factors, with or without a third tensor `self` that is added to them."""

    def signature(self, node: Node) -> Signature:
        names = index_names(len(node.type.shape))
        added = node.op.startswith(("add", "badd"))
        factors = node.input_types[1:] if added else node.input_types
        ranks = tuple(len(type.shape) for type in factors)
        dims: tuple[Dims, Dims]
        if node.op in ("outer", "ger", "addr"):
            dims = (names[0],), (names[1],)
        elif node.op == "addbmm":
            dims = (None, names[0], None), (None, None, names[1])
        elif node.op == "inner":
            dims = (*names[: ranks[0] - 1], None), (*names[ranks[0] - 1 :], None)
        elif node.op == "tensordot":
            dims = _tensordot_dims(node, names)
        else:
            dims = _matmul_dims(node, [type.shape for type in factors], names)
        inputs = (broadcast_dims(node.input_types[0], node.type), *dims) if added else dims
        return Signature(dict(zip(names, node.type.shape)), inputs, names)

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return call_op(call.node, inputs)

    def example(self, rng: random.Random) -> Example:
        op = rng.choice(MATRIX)
        b, n, m, k = (rng.randint(1, 5) for _ in range(4))
        mm = ([n, k], [k, m])
        shapes = {
            "mm": mm, "bmm": ([b, n, k], [b, k, m]), "mv": ([n, k], [k]), "dot": ([k], [k]), "vdot": ([k], [k]),
            "outer": ([n], [m]), "ger": ([n], [m]), "addmm": mm, "addmv": ([n, k], [k]), "addr": ([n], [m]),
            "addbmm": ([b, n, k], [b, k, m]), "baddbmm": ([b, n, k], [b, k, m]),
        }  # fmt: skip
        if op == "inner":
            pair = [rng.randint(1, 4) for _ in range(rng.randint(0, 2))] + [k], [n, k][rng.randint(0, 1) :]
        elif op == "tensordot":
            pair = [n, k, b], [b, m, k]
            if rng.random() < 0.5:
                return Example(aten("aten.tensordot.default"), (*map(_random, pair), [1, -1], [2, 0]))
            return Example(aten("aten.tensordot.default"), (*map(_random, pair), [2], [0]))
        elif op in shapes:
            pair = shapes[op]
        else:
            batch = [rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
            lead = ([1 if rng.random() < 0.3 else size for size in batch[rng.randint(0, len(batch)) :]] for _ in "ab")
            pair = [*next(lead), n, k], [*next(lead), k, m]
            if rng.random() < 0.2:
                pair = [k], pair[1]
            if rng.random() < 0.2:
                pair = pair[0], [k]
        if "add" not in op:
            return Example(aten(f"aten.{op}.default"), tuple(map(_random, pair)))
        out = {"addmv": [n], "baddbmm": [b, n, m]}.get(op, [n, m])
        added = _random([1 if rng.random() < 0.3 else size for size in out[rng.randint(0, len(out)) :]])
        kwargs = {"alpha": rng.uniform(-2, 2), "beta": rng.choice((0.0, 0.5, 1.0))}
        return Example(aten(f"aten.{op}.default"), (added, *map(_random, pair)), kwargs)


def _random(shape: list[int]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _matmul_dims(node: Node, shapes: list[tuple[int, ...]], names: tuple[str, ...]) -> tuple[Dims, Dims]:
    """Batch dims are broadcast; a vector on the left is a row that goes away, on the right a column."""
    a, b = shapes
    rows, columns = int(len(a) > 1), int(len(b) > 1)
    batch = len(names) - rows - columns
    sizes = node.type.shape[:batch]
    row, column = names[batch : batch + rows], names[batch + rows :]
    left = (*broadcast(a[:-2], sizes, names[:batch]), *row, None)
    right = (*broadcast(b[:-2], sizes, names[:batch]), None, *column)
    return left, right


def _tensordot_dims(node: Node, names: tuple[str, ...]) -> tuple[Dims, Dims]:
    rest = iter(names)
    dims = []
    for type, summed in zip(node.input_types, (node["dims_self"], node["dims_other"])):
        gone = {dim % len(type.shape) for dim in summed}
        dims.append(tuple(None if dim in gone else next(rest) for dim in range(len(type.shape))))
    return dims[0], dims[1]


class Einsum(Rule):
    """The letters that remain in the output may be split, unless one runs along two dims of an operand."""

    def signature(self, node: Node) -> Signature:
        operands, output = parse_einsum(node["equation"], [len(type.shape) for type in node.input_types])
        sizes = dict(zip(output, node.type.shape))
        twice = {name for letters in operands for name, count in Counter(letters).items() if count > 1}
        inputs = tuple(
            tuple(
                name if sizes.get(name) == size and name not in twice else None
                for name, size in zip(letters, type.shape)
            )
            for letters, type in zip(operands, node.input_types)
        )
        named = {name for dims in inputs for name in dims}
        return Signature(
            {name: size for name, size in sizes.items() if name in named},
            inputs,
            tuple(name if name in named else None for name in output),
        )

    def run(self, call: Call, *inputs: Tensor) -> Tensor:
        return torch.einsum(call["equation"], *inputs)

    def example(self, rng: random.Random) -> Example:
        equation = rng.choice(EQUATIONS)
        size = {letter: rng.randint(1, 5) for letter in "abcdehnw"}
        lead = [rng.randint(1, 4) for _ in range(rng.randint(0, 2))]
        tensors = []
        for term in equation.replace(" ", "").split("->")[0].split(","):
            letters = re.findall(r"\.\.\.|\w", term)
            tensors.append(_random([s for letter in letters for s in (lead if letter == "..." else [size[letter]])]))
        if rng.random() < 0.2:  # a dim of size 1 is broadcast
            dim = rng.randrange(max(1, tensors[0].dim()))
            tensors[0] = tensors[0].narrow(dim, 0, 1) if tensors[0].dim() and len(tensors) > 1 else tensors[0]
        return Example(aten("aten.einsum.default"), (equation, tensors))


EQUATIONS = (
    "ab,bc->ac", "ab,bc", "nab,nbc->nac", "nchw,ec->nehw", "...a,ba->...b", "...ab,...bc->...ac", "ab...,bc->...ac",
    "a,b->ab", "a,a->", "ab->ba", "aab->ab", "ab->a", "ba", "nabh,nabw->nhw", "ab, bc, cd -> ad", "aa->a", "...a,...a",
)  # fmt: skip


def parse_einsum(equation: str, ranks: list[int]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """The letters of each operand of the given rank, and of the output; `...` becomes `...0`, `...1` from the last dim.

    >>> parse_einsum("...a,ba->...b", [3, 2])
    ([('...1', '...0', 'a'), ('b', 'a')], ('...1', '...0', 'b'))
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [re.findall(r"\.\.\.|[A-Za-z]", term) for term in left.split(",")]
    covered = [rank - sum(letter != "..." for letter in term) for term, rank in zip(terms, ranks)]

    def spelled(term: list[str], dims: int) -> tuple[str, ...]:
        lead = [f"...{dim}" for dim in reversed(range(dims))]
        return tuple(name for letter in term for name in (lead if letter == "..." else [letter]))

    if arrow:
        result = re.findall(r"\.\.\.|[A-Za-z]", right)
    else:
        once = Counter(letter for term in terms for letter in term if letter != "...")
        result = ["...", *sorted(letter for letter, count in once.items() if count == 1)]
    widest = max((dims for term, dims in zip(terms, covered) if "..." in term), default=0)
    return [spelled(term, dims) for term, dims in zip(terms, covered)], spelled(result, widest)


register(MatMul(), *MATRIX)
register(Einsum(), "einsum.default")
