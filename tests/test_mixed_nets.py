"""Small nets around ops that people mix into CNNs, split over rows, samples and both, against one process."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halocline.comm.threads import run_threads
from halocline.verify import verify

Function = Callable[..., Tensor]


class Net(nn.Module):
    """A convolution, then a function of its output, the input and further layers."""

    def __init__(self, function: Function, *layers: nn.Module) -> None:
        super().__init__()
        self.conv, self.layers, self.function = nn.Conv2d(3, 3, 3, padding=1), nn.ModuleList(layers), function
        self.means = torch.randn(1, 3, 1, 1, dtype=torch.float64)  # neither parameter nor buffer

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.function(self, x, *more)


def tied() -> Net:
    net = Net(lambda net, x: net.layers[0](F.relu(net.conv(x))), nn.Conv2d(3, 3, 3, padding=1))
    net.layers[0].weight = net.conv.weight
    return net


def attended(net: Net, x: Tensor) -> Tensor:
    places = net.conv(x).flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(places, places, places).transpose(1, 2).unflatten(2, x.shape[2:])


def heads(net: Net, x: Tensor) -> Tensor:
    places = net.conv(x).flatten(2).transpose(1, 2)
    return net.layers[0](places, places, places)[0].transpose(1, 2).unflatten(2, x.shape[2:])


def recurrent(net: Net, x: Tensor) -> Tensor:
    rows = net.conv(x).permute(2, 0, 3, 1).flatten(1, 2)
    return net.layers[0](rows)[0].unflatten(1, (x.shape[0], x.shape[3])).permute(1, 3, 0, 2)


def looked_up(net: Net, numbers: Tensor) -> Tensor:
    return net.conv(net.layers[0](numbers).permute(0, 3, 1, 2))


def turned(net: Net, x: Tensor) -> Tensor:
    angle = torch.tensor([[0.8, -0.6, 0.1], [0.6, 0.8, 0.0]], dtype=x.dtype).expand(x.shape[0], 2, 3)
    return F.grid_sample(net.conv(x), F.affine_grid(angle, list(x.shape), align_corners=False), align_corners=False)


def transformed(net: Net, x: Tensor) -> Tensor:
    return torch.fft.irfft2(torch.fft.rfft2(net.conv(x)), s=x.shape[2:])


def folded(net: Net, x: Tensor) -> Tensor:
    return F.fold(F.unfold(net.conv(x), 3, padding=1), x.shape[2:], 3, padding=1)


X = torch.randn(2, 3, 12, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NETS: dict[str, Any] = {
    "one weight twice": (tied, (X,)),
    "plain tensors of the module": (lambda: Net(lambda net, x: net.conv(x - net.means)), (X,)),
    "two inputs of other sizes": (lambda: Net(lambda net, x, z: net.conv(x) + z.mean((1, 2, 3)).view(-1, 1, 1, 1)),
                                  (X, X[:, :1, :5, :6] * 3)),
    "bytes": (lambda: Net(lambda net, x: net.conv(x.double() / 255)), ((X * 40 + 128).to(torch.uint8),)),
    "a mask": (lambda: Net(lambda net, x, mask: net.conv(x) * mask), (X, X[:, :1] > 0)),
    "embedding": (lambda: Net(looked_up, nn.Embedding(7, 3)), ((X[:, 0] * 3).long().abs() % 7,)),
    "Fourier transform": (lambda: Net(transformed), (X,)),
    "unfold and fold": (lambda: Net(folded), (X,)),
    "attention": (lambda: Net(attended), (X,)),
    "attention with heads": (lambda: Net(heads, nn.MultiheadAttention(3, 3, batch_first=True)), (X,)),
    "einsum": (lambda: Net(lambda net, x: torch.einsum("nchw,ck->nkhw", net.conv(x), net.layers[0].weight),
                           nn.Linear(3, 3)), (X,)),
    "a turned grid": (lambda: Net(turned), (X,)),
    "recurrent": (lambda: Net(recurrent, nn.LSTM(3, 3)), (X,)),
    "sorted": (lambda: Net(lambda net, x: net.conv(x).sort(2)[0]), (X,)),
    "largest few": (lambda: Net(lambda net, x: x - net.conv(x).flatten(2).topk(4)[0].mean(2)[..., None, None]), (X,)),
    "channels in another order": (lambda: Net(lambda net, x: net.conv(x)[:, torch.tensor([2, 0, 1])]), (X,)),
    "standardised": (lambda: Net(lambda net, x: x / (net.conv(x).std((2, 3), keepdim=True) + 0.1)), (X,)),
    "log of a sum": (lambda: Net(lambda net, x: x - net.conv(x).logsumexp((1, 2, 3), keepdim=True)), (X,)),
    "local response": (lambda: Net(lambda net, x: F.local_response_norm(net.conv(x), 3)), (X,)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NETS)
def test_net_equals_one_process(name: str) -> None:
    build, inputs = NETS[name]
    torch.manual_seed(1)
    net = build().double()
    batch = (*inputs, torch.randn_like(net(*inputs)))
    for plan, ranks in (("h=2", 2), ("n=2", 2), ("h=2,w=2", 4)):
        run_threads(ranks, lambda comm, plan=plan: check(comm, net, batch, plan), timeout_s=120)


def check(comm: Any, net: nn.Module, batch: tuple[Tensor, ...], plan: str) -> None:
    report = verify(copy.deepcopy(net), nn.MSELoss(), batch, plan, comm=comm)
    assert report.passed, f"{plan}: {report}"
