"""Writes `ops.md`: every op that has a rule, along which indices it may be split, and what it refuses.

`python docs/list_ops.py` writes it anew. All of it is read off the rules: their docstrings, what they are registered
for, the signatures of random calls (those of the contract test), and the errors in their code.
"""

import ast
import inspect
import random
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from halocline.errors import PlanError
from halocline.graph import Node, TensorType
from halocline.ops.call_op import bound, node_of
from halocline.ops.rule import RULES, Rule

PAGE = Path(__file__).parent / "ops.md"
CALLS = 60
ORDER = ("n", "c", "f", "d", "h", "w")
INTRODUCTION = """# Ops

Every op that has a rule, by the file of `src/halocline/ops/` that holds it. Written by `python docs/list_ops.py`.

*Split along* names the indices of the op's index space that a plan may split: n samples, c channels, f filters or
features, d, h and w space (for tensors of other ranks: n, c, then space). An index in brackets may be split in some
calls only, such as one without groups or without a reduction over it. Where the index that a plan splits is not among
them, the op's inputs are gathered along it, and every rank computes the op whole: right, but not faster. *Refused* is
what a rule does not compute: such a model is refused before any data moves, with the module and the source line.

An op without a rule is computed whole on every rank, from gathered inputs, unless it draws random numbers: that is
refused. In-place forms, `out=` and writing through views are turned into the forms listed here by capture. Data-
dependent control flow and shapes that depend on values are refused by capture. [adding-an-op.md](adding-an-op.md)
tells how to add a rule.
"""


def page() -> str:
    """The text of `ops.md`."""
    modules: dict[ModuleType, dict[int, tuple[Rule, list[str]]]] = {}
    for op, rule in RULES.items():
        module = sys.modules[type(rule).__module__]
        if module.__name__.startswith("halocline.ops."):
            modules.setdefault(module, {}).setdefault(id(rule), (rule, []))[1].append(op)
    parts = [INTRODUCTION]
    for module in sorted(modules, key=lambda module: module.__name__):
        parts.append(f"## {module.__name__.rpartition('.')[2]}.py\n\n{_paragraphs(module.__doc__)}\n")
        parts += [_section(rule, ops) for rule, ops in modules[module].values()]
    return "\n".join(parts)


def _section(rule: Rule, ops: list[str]) -> str:
    lines = [f"**{type(rule).__name__}**: {_paragraphs(type(rule).__doc__)}", ""]
    lines.append(f"* Ops: {', '.join(f'`{op}`' for op in sorted(ops))}")
    indices = _indices(rule)
    if indices is not None:
        lines.append(f"* Split along: {indices}")
    refusals = list(dict.fromkeys(_refusals(type(rule))))
    lines += [f"* Refused: {refusal}" for refusal in refusals]
    return "\n".join(lines) + "\n"


def _paragraphs(text: str | None) -> str:
    return inspect.cleandoc(text or "")


def _indices(rule: Rule) -> str | None:
    """The indices that may be split, those that only some calls have in brackets; None for a rule without example."""
    rng = random.Random(0)
    counts: dict[str, int] = {}
    ranks: dict[str, int] = {}
    try:
        for _ in range(CALLS):
            node = _example(rule, rng)
            indices = rule.signature(node).indices
            whole = {name for name in ORDER if name in _possible(node)}
            for name in indices:
                counts[name] = counts.get(name, 0) + 1
            for name in whole | set(indices) | {"f"}:
                ranks[name] = ranks.get(name, 0) + 1
    except NotImplementedError:
        return None
    names = sorted(counts, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    named = [name for name in names if name in ORDER]
    described = [name if counts[name] == ranks[name] else f"({name})" for name in named]
    if len(named) < len(names):
        described.append("its other dims")
    return ", ".join(described) or "nothing"


def _possible(node: Node) -> tuple[str, ...]:
    """The indices that a call with tensors of these ranks would have if all could be split."""
    rank = max((len(type.shape) for type in (*node.input_types, node.type)), default=0)
    return ("n", "c")[:rank] + ("d", "h", "w")[5 - max(rank, 2) :] if rank <= 5 else ()


def _example(rule: Rule, rng: random.Random) -> Node:
    torch.manual_seed(rng.randrange(1 << 30))
    example = rule.example(rng)

    def value_of(argument: Any) -> tuple[str, TensorType] | None:
        if not isinstance(argument, Tensor):
            return None
        return f"x{id(argument)}", TensorType(tuple(argument.shape), argument.dtype)

    arguments = bound(example.target, example.args, example.kwargs)
    output = example.target(*example.args, **example.kwargs)
    number = None
    if isinstance(output, list | tuple):
        number, output = 0, output[0]
    type = TensorType(tuple(output.shape), output.dtype)
    return node_of(example.target, arguments, value_of, "y", type, output=number)


def _refusals(rule: type) -> Iterator[str]:
    """The texts of the plan errors that the rule's code, or a function of its file that it calls, raises."""
    module = sys.modules[rule.__module__]
    functions = {
        name: f for name, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == rule.__module__
    }
    seen: set[str] = set()
    waiting: list[Any] = [rule]
    while waiting:
        tree = ast.parse(textwrap.dedent(inspect.getsource(waiting.pop())))
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                if getattr(node.exc.func, "id", "") == PlanError.__name__:
                    yield _text(node.exc.args[0])
            elif isinstance(node, ast.Name) and node.id in functions and node.id not in seen:
                seen.add(node.id)
                waiting.append(functions[node.id])


def _text(message: ast.expr) -> str:
    """An f-string without its fields."""
    parts: list[str] = []
    for value in message.values if isinstance(message, ast.JoinedStr) else [message]:
        if isinstance(value, ast.Constant):
            parts.append(str(value.value))
        elif isinstance(value, ast.FormattedValue):
            code = ast.unparse(value.value)
            parts.append("" if code.endswith("where()") else "…")
    return "".join(parts).strip(" :,").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(page())
