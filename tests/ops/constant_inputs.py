"""One call of an op, some of whose tensors get no gradient from torch, under a split that a test chooses."""

from typing import Any

import torch
from torch import Tensor

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.graph import Graph, Node, TensorType
from halocline.lowering import lower
from halocline.mesh import Mesh
from halocline.ops.rule import Noise
from halocline.placement import Placement, Plan
from halocline.runtime import Runner

from .fixed_split import node_for


def check_first_gradient(target: Any, args: tuple[Any, ...], split: dict[str, int]) -> None:
    """Checks the output and the gradient of the first tensor; the others are replicated and get none."""
    node, values = node_for(target, *args)
    types = {name: TensorType(tuple(value.shape), value.dtype) for name, value in values.items()}
    first, *others = node.inputs
    held = {name: name for name in others}
    graph = Graph((node,), {first: types[first]}, {}, held, ("y",), {}, {"y": node.type, **types})
    mesh = Mesh(tuple((f"axis_{index}", parts) for index, parts in split.items()))
    plan = Plan(mesh, {"y": {index: (f"axis_{index}",) for index in split}}, {})
    program = lower(Placement(graph, plan), frozenset({first}))
    x = args[0].clone().requires_grad_()
    want = target(x, *args[1:])
    cotangent = torch.rand_like(want)
    want.backward(cotangent)

    def rank(comm: Comm) -> None:
        torch.set_num_threads(1)
        runner = Runner(program, comm, Noise())
        (output,), tape = runner.forward(values)
        region = program.placement.layouts["y"].region(comm.rank).intervals
        mine = tuple(slice(*interval) for interval in region)
        torch.testing.assert_close(output, want.detach()[mine], rtol=1e-9, atol=1e-11, equal_nan=True)
        grads = runner.backward(tape, [cotangent[mine]])
        torch.testing.assert_close(grads[first], x.grad, rtol=1e-9, atol=1e-11, equal_nan=True)

    run_threads(mesh.size, rank)


def output_of(node: Node, values: dict[str, Tensor], split: dict[str, int]) -> Tensor:
    """The output of a node whose inputs all ranks hold, put together, in fp64."""
    types = dict(zip(node.inputs, node.input_types))
    graph = Graph((node,), {}, {name: name for name in types}, {}, ("y",), {}, {"y": node.type, **types})
    mesh = Mesh(tuple((f"axis_{index}", parts) for index, parts in split.items()))
    plan = Plan(mesh, {"y": {index: (f"axis_{index}",) for index in split}}, {})
    program = lower(Placement(graph, plan), frozenset())
    y = torch.full(node.type.shape, torch.nan).double()

    def rank(comm: Comm) -> None:
        torch.set_num_threads(1)
        (output,), _ = Runner(program, comm, Noise()).forward(values)
        assert output.dtype == node.type.dtype
        y[tuple(slice(*i) for i in program.placement.layouts["y"].region(comm.rank).intervals)] = output.double()

    run_threads(mesh.size, rank)
    return y
