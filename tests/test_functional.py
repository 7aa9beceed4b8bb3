"""In-place ops on views, on what has views, on buffers and through `out=`: a graph computes what the code does."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halocline.capture import capture
from halocline.errors import CaptureError
from halocline.graph import Graph
from halocline.ops.rule import Noise
from halocline.prepared import leaves_of
from halocline.verify import whole_values


class Writing(nn.Module):
    def __init__(self, write: Callable[["Writing", Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("table", torch.arange(8.0).view(4, 2))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self, x * self.scale.view(1, -1, 1, 1))


def rows(m: Writing, y: Tensor) -> Tensor:
    y[:, :, 0:1].mul_(2)
    return y.clamp_(min=0)


def ends(m: Writing, y: Tensor) -> Tensor:
    y[:, 0] = 1.0
    y[:, :, 1] += y[:, :, 0]
    y[..., ::2].neg_()
    return y


def chain_of_views(m: Writing, y: Tensor) -> Tensor:
    flat = y.view(2, -1)
    part = flat.transpose(0, 1)[3:9].unsqueeze(0)
    part.tanh_()
    return flat + y.flatten(1)


def siblings(m: Writing, y: Tensor) -> Tensor:
    a, b = y[:, :2], y.narrow(1, 2, 2)
    c = y.permute(0, 2, 3, 1)
    a.add_(b)
    b.add_(a)
    c[:, 0].zero_()
    c.sub_(1)
    return torch.cat([a, b], 1) + c.permute(0, 3, 1, 2)


def result_and_its_source(m: Writing, y: Tensor) -> Tensor:
    z = y.neg_()
    w = z.add_(1)
    return w.view(2, -1).mul_(0.5).sum() + y + z


def copy_of_a_transposed(m: Writing, y: Tensor) -> Tensor:
    z = y.transpose(2, 3).reshape(2, 4, -1)  # a copy: `y` stays
    z.mul_(3)
    return z.sum(2)[..., None, None] + y


def dropout_that_does_nothing(m: Writing, y: Tensor) -> Tensor:
    z = nn.functional.dropout(y, 0.5, training=False)
    z.mul_(2)
    return z + y


def masked(m: Writing, y: Tensor) -> Tensor:
    y[y > 0.5] = 0.1
    y[:, 1].masked_fill_(y[:, 0] < 0, 0.3)
    return y


def allocated(m: Writing, y: Tensor) -> Tensor:
    out = torch.zeros_like(y)
    out[:, :2] = y[:, 2:]
    out[:, 2:, 1:].copy_(y[:, :2, :-1])
    return out


def narrower_dtype(m: Writing, y: Tensor) -> Tensor:
    half = y.float()
    half[:, 0].mul_(y[:, 0])
    return half.double() + y


def buffers(m: Writing, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.seen.mul_(0.9).add_(y.mean((0, 2, 3)), alpha=0.1)
        m.table[:, 0].copy_(m.seen)
        m.table.data[1:].mul_(2)
        m.table.split([1, 3])[1].add_(1)
        m.table.unbind(1)[0].sub_(0.5)
        torch.div(m.seen, 3.0, out=m.seen)
    return y * m.seen.view(1, -1, 1, 1) + m.table.sum()


def data(m: Writing, y: Tensor) -> Tensor:
    return torch.cat([y, y.data], 1)


WRITES = [
    rows, ends, chain_of_views, siblings, result_and_its_source, copy_of_a_transposed, dropout_that_does_nothing,
    masked, allocated, narrower_dtype, buffers, data,
]  # fmt: skip


def run(graph: Graph, model: nn.Module, x: Tensor) -> Tensor:
    leaves = leaves_of(graph, model, None)
    values = whole_values(graph, leaves | dict(zip(graph.inputs, (x,))), Noise())
    with torch.no_grad():
        for buffer, value in graph.updates.items():
            leaves[buffer].copy_(values[value])
    return values[graph.outputs[0]]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_the_graph_computes_what_the_code_does(write: Callable[[Writing, Tensor], Tensor]) -> None:
    model = Writing(write).double()
    twin, x = copy.deepcopy(model), torch.randn(2, 4, 5, 6, dtype=torch.float64)
    graph, _ = capture(model, None, (x,))
    assert not any(node.op.endswith("_") and not node.op.startswith("_") for node in graph.nodes)
    for _ in range(2):
        cotangent = torch.randn_like(model(x))
        model, twin = copy.deepcopy(twin), twin
        output, expected = run(graph, model, x), twin(x)
        torch.testing.assert_close(output, expected)
        output.backward(cotangent)
        expected.backward(cotangent)
        torch.testing.assert_close(model.scale.grad, twin.scale.grad)
        for (name, mine), other in zip(model.named_buffers(), twin.buffers()):
            torch.testing.assert_close(mine, other, msg=lambda text, name=name: f"{name}: {text}")
        twin.zero_grad()


def under_a_gradient(m: Writing, y: Tensor) -> Tensor:
    y.data[:, 0].mul_(2)
    return y


def overlapping(m: Writing, y: Tensor) -> Tensor:
    y.as_strided((2, 2), (1, 1)).mul_(2)
    return y


def parameter(m: Writing, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.scale[:2].mul_(2)
    return y * m.scale.view(1, -1, 1, 1)


@pytest.mark.parametrize("write", [under_a_gradient, overlapping, parameter], ids=lambda write: write.__name__)
def test_what_cannot_be_said_is_refused_with_its_line(write: Callable[[Writing, Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"test_functional.py:\d+: .*mul_.*(out-of-place|Change a copy)"):
        capture(Writing(write), None, (torch.randn(2, 4, 5, 6),))
