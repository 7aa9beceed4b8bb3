"""The kernels chosen for convolutions give what torch gives, in the memory format that they were given."""

import random

import pytest
import torch
from torch import Tensor

from halocline.ops.kernels import Arguments, convolution_grads, convolve

FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}


def call(rng: random.Random) -> tuple[Tensor, Tensor, Tensor | None, Arguments]:
    dims, groups = rng.choice((1, 2, 2, 3, 3)), rng.choice((1, 1, 1, 2))
    kernel = [1] * dims if rng.random() < 0.3 else [rng.randint(1, 3) for _ in range(dims)]
    stride, dilation, padding = ([rng.randint(a, 2) for _ in range(dims)] for a in (1, 1, 0))
    if rng.random() < 0.5:
        stride = dilation = [1] * dims
    sizes = [d * (k - 1) + 1 + rng.randint(0, 8) for d, k in zip(dilation, kernel)]
    channels, filters = groups * rng.randint(1, 9), groups * rng.randint(1, 9)
    x = torch.randn(rng.choice((1, 1, 2)), channels, *sizes)
    weight = torch.randn(filters, channels // groups, *kernel)
    if dims > 1 and rng.random() < 0.7:
        x, weight = (tensor.contiguous(memory_format=FORMATS[dims]) for tensor in (x, weight))
    bias = torch.randn(filters) if rng.random() < 0.5 else None
    return x, weight, bias, (stride, padding, dilation, False, [0] * dims, groups)


def near(found: Tensor | None, want: Tensor | None) -> None:
    if want is not None:
        assert found is not None
        scale = float(want.abs().max()) or 1.0
        torch.testing.assert_close(found.double() / scale, want / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", range(60))
def test_values_and_gradients_are_those_of_torch(seed: int, threads: int) -> None:
    rng, before = random.Random(seed), torch.get_num_threads()
    torch.manual_seed(seed)
    x, weight, bias, arguments = call(rng)
    wanted = (rng.random() < 0.8, True, bias is not None)
    torch.set_num_threads(threads)
    try:
        output = convolve(x, weight, bias, arguments)
        grad = torch.randn_like(output)
        grads = convolution_grads(grad, x, weight, arguments, wanted)
    finally:
        torch.set_num_threads(before)
    wide = x.double(), weight.double()
    near(output, torch.convolution(*wide, None if bias is None else bias.double(), *arguments))
    biases = [len(weight)] if bias is not None else None
    exact = torch.ops.aten.convolution_backward(grad.double(), *wide, biases, *arguments, wanted)
    for found, want in zip(grads, exact, strict=True):
        near(found, want)
    if x.dim() > 3 and x.shape[1] > 1 and len(weight) > 1 and x.stride(1) == 1:
        for tensor in (output, *grads[: wanted[0]]):
            assert tensor is not None and tensor.is_contiguous(memory_format=FORMATS[x.dim() - 2])


def test_wide_pointwise_layers_of_few_points() -> None:
    x, weight = torch.randn(1, 1024, 5, 5), torch.randn(3, 1024, 1, 1)
    arguments: Arguments = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    output = convolve(x, weight, None, arguments)
    grads = convolution_grads(output, x, weight, arguments, (True, True, False))
    exact = torch.ops.aten.convolution_backward(
        output.double(), x.double(), weight.double(), None, *arguments, (True, True, False)
    )
    for found, want in zip(grads, exact, strict=True):
        near(found, want)
