"""The contract every op rule keeps: split at random over 1 to 8 ranks, it gives what plain torch gives.

`python -m tests.contract --count 5000 --seed 7` runs as many random configurations as one likes; `--op conv2d` only one
op's. A failing configuration prints the command that repeats it.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.graph import Graph, TensorType
from halocline.lowering import lower
from halocline.mesh import Mesh, prime_mesh
from halocline.ops import rule_for
from halocline.ops.call_op import bound, node_of
from halocline.ops.rule import RULES, Example, Noise, Rule
from halocline.placement import Placement, Plan
from halocline.program import Program
from halocline.runtime import Runner

RTOL, ATOL = 1e-9, 1e-11


@dataclass(frozen=True)
class Config:
    """One call of an op, and how it is split."""

    example: Example
    values: dict[str, Tensor]
    changed: dict[str, Tensor]  # the inputs that the op changes in place, as they are afterwards
    program: Program
    output: Tensor

    def __str__(self) -> str:
        placement = self.program.placement
        shapes = {name: tuple(value.shape) for name, value in self.values.items()}
        return f"{placement.graph.nodes[0]}\n  inputs {shapes}\n  {placement.plan!s}"


def rules() -> dict[str, Rule]:
    """Every rule with an example, by the first op it is registered for."""
    found: dict[int, tuple[str, Rule]] = {}
    for op, rule in RULES.items():
        if type(rule).example is not Rule.example:
            found.setdefault(id(rule), (op, rule))
    return dict(found.values())


def draw(rule: Rule, rng: random.Random) -> Config:
    torch.manual_seed(rng.randrange(1 << 30))
    example = rule.example(rng)
    arguments = bound(example.target, example.args, example.kwargs)
    names: dict[int, str] = {}
    values: dict[str, Tensor] = {}

    def value_of(argument: Any) -> tuple[str, TensorType] | None:
        if not isinstance(argument, Tensor):
            return None
        name = names.setdefault(id(argument), f"x{len(names)}")
        values[name] = argument
        return name, TensorType(tuple(argument.shape), argument.dtype)

    node = node_of(example.target, arguments, value_of, "y", TensorType((), torch.float64))
    before = {name: value.clone() for name, value in values.items()}
    torch.manual_seed(0)
    output = example.target(*example.args, **example.kwargs)
    number = rng.randrange(len(output)) if isinstance(output, (tuple, list)) else None
    output = output if number is None else output[number]
    node = node_of(
        example.target, arguments, value_of, "y", TensorType(tuple(output.shape), output.dtype), output=number
    )
    changed = {name: value.clone() for name, value in values.items() if not _equal(value, before[name])}
    mesh = prime_mesh(rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8)))
    replicated = {name for name in values if name in changed or rng.random() < 0.2}
    graph = Graph(
        nodes=(node,),
        inputs={name: _type(value) for name, value in values.items() if name not in replicated},
        parameters={name: name for name in values if name in replicated},
        buffers={},
        outputs=("y",),
        updates={},
        types={"y": node.type, **{name: _type(value) for name, value in values.items()}},
    )
    signature = rule_for(node).signature(node)
    split = _split(rng, mesh, list(signature.indices))
    inputs = {name: _split(rng, mesh, list(range(len(type.shape)))) for name, type in graph.inputs.items()}
    if rng.random() < 0.5:  # laid out as the node reads it, so that only halos move
        for name, dims in zip(node.inputs, signature.inputs):
            inputs[name] = {dim: split[index] for dim, index in enumerate(dims) if index is not None and index in split}
    plan = Plan(mesh, {"y": split}, {name: inputs[name] for name in graph.inputs})
    wanted = frozenset(name for name, value in values.items() if value.is_floating_point() and name not in changed)
    return Config(
        example, before, changed, lower(Placement(graph, plan), wanted, rng.choice(("extend", "correct"))), output
    )


def _type(value: Tensor) -> TensorType:
    return TensorType(tuple(value.shape), value.dtype)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _split(rng: random.Random, mesh: Mesh, choices: list[Any]) -> dict[Any, tuple[str, ...]]:
    """Every axis goes to one of `choices`, or to none."""
    split: dict[Any, tuple[str, ...]] = {}
    for axis in mesh.names:
        if choices and rng.random() < 0.85:
            choice = rng.choice(choices)
            split[choice] = (*split.get(choice, ()), axis)
    return split


def reference(config: Config, cotangent: Tensor) -> dict[str, Tensor | None]:
    """The gradients plain torch gives."""
    graph = config.program.graph
    node = graph.nodes[0]
    leaves = {name: value.clone() for name, value in config.values.items()}
    for name in config.program.differentiable - {"y"}:
        leaves[name].requires_grad_()
    from halocline.ops.call_op import call_op

    output = call_op(node, [leaves[name] for name in node.inputs])
    if output.requires_grad:
        output.backward(cotangent)
    return {name: leaves[name].grad for name in config.program.differentiable - {"y"}}


def check(config: Config) -> None:
    """Raises AssertionError where a rank's output, a gradient or a changed buffer is not what plain torch gives."""
    placement = config.program.placement
    graph, layouts = placement.graph, placement.layouts
    cotangent = torch.randn(config.output.shape, dtype=torch.float64).to(config.output.dtype)
    expected = reference(config, cotangent)

    def rank(comm: Comm) -> None:
        torch.set_num_threads(1)

        def mine(name: str, whole: Tensor) -> Tensor:
            region = layouts[name].region(comm.rank)
            return whole[tuple(slice(*interval) for interval in region.intervals)].clone()

        def same(what: str, got: Tensor | None, whole: Tensor | None, name: str) -> None:
            want = torch.zeros(layouts[name].shape, dtype=torch.float64) if whole is None else whole
            want = mine(name, want)
            got = torch.zeros_like(want) if got is None else got
            assert got.shape == want.shape, f"{what} on rank {comm.rank}: shape {got.shape}, not {want.shape}"
            close = torch.isclose(got, want, RTOL, ATOL, equal_nan=True)
            worst = (got - want).abs().max() if got.numel() and got.is_floating_point() else None
            assert close.all(), f"{what} on rank {comm.rank}: differs, by up to {worst}"

        runner = Runner(config.program, comm, Noise())
        values = {name: mine(name, value) for name, value in config.values.items()}
        outputs, tape = runner.forward(values)
        assert outputs[0].dtype == config.output.dtype
        same("output", outputs[0], config.output, "y")
        for name, value in config.changed.items():
            same(f"changed {name}", values[name], value, name)
        if graph.nodes[0].name in config.program.differentiable:
            grads = runner.backward(tape, [mine("y", cotangent)])
            for name, value in expected.items():
                same(f"gradient of {name}", grads.get(name), value, name)

    run_threads(placement.mesh.size, rank)


def run(op: str, rule: Rule, seed: int) -> None:
    """One configuration, repeatable by its seed."""
    rng = random.Random(f"{op} {seed}")
    config = None
    try:
        config = draw(rule, rng)
        check(config)
    except Exception as error:
        repeat = f"python -m tests.contract --op {op} --seed {seed} --count 1"
        raise AssertionError(f"{op}: {type(error).__name__}: {error}\n  {config}\n  repeat with: {repeat}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", help="only the rule of this op")
    parser.add_argument("--count", type=int, default=1000, help="configurations in all (of each rule with --op)")
    parser.add_argument("--seed", type=int, default=0, help="the first configuration's seed")
    options = parser.parse_args()
    chosen = rules()
    if options.op:
        chosen = {options.op: RULES[options.op]}
    each: Callable[[int], int] = lambda count: -(-count // len(chosen))  # noqa: E731
    failed = 0
    for op, rule in chosen.items():
        for seed in range(options.seed, options.seed + each(options.count)):
            try:
                run(op, rule, seed)
            except AssertionError as error:
                failed += 1
                print(error, flush=True)
                if failed >= 10:
                    raise SystemExit("ten configurations failed; stopping") from None
    print(f"{each(options.count) * len(chosen)} configurations of {len(chosen)} rules, {failed} failed")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
