"""The networks are those of the papers: parameters, FLOPs, shapes, names."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from halocline.models.cosmoflow import cosmoflow
from halocline.models.mesh_tangling import mesh_tangling_1k, mesh_tangling_2k, mini_mesh
from halocline.models.resnet import resnet50, resnet_small
from halocline.models.unet import unet2d, unet3d


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def forward_flops(model: nn.Module, *shape: int) -> int:
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.empty(*shape, device="meta"))
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "build, size, millions, gflop",
    [(mesh_tangling_1k, 1024, 34.4, 2365), (mesh_tangling_2k, 2048, 12.4, 1895)],
)
def test_mesh_tangling_is_the_papers(build, size, millions, gflop):
    with torch.device("meta"):
        model = build()
    assert round(parameters(model) / 1e6, 1) == millions
    assert round(forward_flops(model, 1, 18, size, size) / 1e9) == gflop
    assert model(torch.empty(1, 18, size, size, device="meta")).shape == (1, 1, size, size)


def test_mesh_tangling_maps_halve_as_in_the_paper():
    with torch.device("meta"):
        model = mesh_tangling_1k()
    x = torch.empty(1, 18, 1024, 1024, device="meta")
    last = {}
    for name, layer in model.named_children():
        x = layer(x)
        if name.startswith("conv"):
            last[name[:5]] = (x.shape[1], x.shape[2])
    assert list(last.values()) == [(256, 512), (384, 256), (512, 128), (384, 64), (384, 32), (128, 32)]


def test_mesh_tangling_layers_are_conv_relu_norm():
    layers = list(mesh_tangling_1k(64, width=0.05).children())
    kinds = [type(layer) for layer in layers]
    assert kinds[:-3] == [nn.Conv2d, nn.ReLU, nn.BatchNorm2d] * 30
    assert kinds[-3:] == [nn.Conv2d, nn.PixelShuffle, nn.Sigmoid]
    assert all(layer.bias is None for layer in layers if isinstance(layer, nn.Conv2d))
    assert {(layer.momentum, layer.eps) for layer in layers if isinstance(layer, nn.BatchNorm2d)} == {(0.1, 1e-5)}
    assert [layer.kernel_size[0] for layer in layers if isinstance(layer, nn.Conv2d)] == [5] + [3] * 29 + [1]


@pytest.mark.parametrize(
    "build, size", [(mesh_tangling_1k, 64), (mesh_tangling_2k, 128), (mini_mesh, 32), (mini_mesh, 8)]
)
def test_mesh_nets_train_when_narrow(build, size):
    model = build(size, width=0.001 if size == 8 else 0.05)
    x = torch.randn(2, 18, size, size)
    y = model(x)
    assert y.shape == (2, 1, size, size)
    assert y.min() >= 0 and y.max() <= 1
    nn.MSELoss()(y, torch.ones_like(y)).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_mini_mesh_has_twelve_layers():
    model = mini_mesh(64)
    assert [type(m) for m in model.children()][:36] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU] * 12
    assert model.conv1_1.stride == (2, 2) and model.conv1_1.kernel_size == (5, 5)


@pytest.mark.parametrize(
    "build, size, text",
    [
        (mesh_tangling_1k, 1000, "size 1000 is not a positive multiple of 32.*Use 992 or 1024"),
        (mesh_tangling_2k, 1056, "mesh_tangling_2k.*multiple of 64"),
        (mini_mesh, 0, "Use 8"),
        (unet2d, 40, "unet2d.*Use 32 or 48"),
        (unet3d, 12, "unet3d.*Use 8 or 16"),
        (cosmoflow, 48, "cosmoflow.*Use 32 or 64"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(build, size, text):
    with pytest.raises(ValueError, match=text):
        build(size)


def test_resnet50_is_the_known_one():
    with torch.device("meta"):
        first, middle = resnet50("first"), resnet50("middle")
    # 25,557,032 parameters and 161 of them named: the figures of torchvision's ResNet-50.
    for model in (first, middle):
        assert parameters(model) == 25_557_032
        assert len(dict(model.named_parameters())) == 161
    assert round(forward_flops(first, 1, 3, 224, 224) / 2e9, 1) == 3.9  # He et al. (2016), table 1: 3.8 without fc
    assert round(forward_flops(middle, 1, 3, 224, 224) / 2e9, 1) == 4.1
    names = middle.state_dict().keys()
    assert {"conv1.weight", "bn1.running_mean", "layer1.0.downsample.0.weight", "layer4.2.bn3.bias", "fc.bias"} <= names
    assert first.layer2[0].conv1.stride == (2, 2) and middle.layer2[0].conv2.stride == (2, 2)


def test_resnet50_refuses_another_placement():
    with pytest.raises(ValueError, match="stride='last' is not a placement"):
        resnet50("last")  # type: ignore[arg-type]


@pytest.mark.parametrize("channels, size", [(1, 32), (3, 64), (1, 33)])
def test_resnet_small(channels, size):
    model = resnet_small(channels)
    model(torch.randn(2, channels, size, size)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert parameters(model) < 200_000


def test_unets_keep_the_size_and_use_every_weight():
    for model, x in (
        (unet2d(32, channels=3, classes=5, width=0.1), torch.randn(2, 3, 32, 48)),
        (unet3d(16, width=0.1), torch.randn(2, 1, 16, 24, 8)),
    ):
        y = model(x)
        assert y.shape == (2, 5 if x.dim() == 4 else 1, *x.shape[2:])
        y.square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_cosmoflow_shapes():
    with torch.device("meta"):
        model = cosmoflow()
    assert model.head[0].in_features == 512 * 4**3
    small = cosmoflow(32, width=0.1)
    y = small(torch.randn(2, 4, 32, 32, 32))
    assert y.shape == (2, 4) and y.abs().max() <= 1.2
