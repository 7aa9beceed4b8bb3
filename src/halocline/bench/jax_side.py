"""JAX as a peer: a chain of convolutions, batch norms and ReLUs, its input sharded over rows on two devices.

Only nets that are one `nn.Sequential` of these layers can be put across. Needs `pip install jax`, which halocline
itself never does.
"""

import os
from collections.abc import Callable

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import nn

from halocline.bench.workload import Workload

Layer = Callable[[jax.Array, dict[str, jax.Array]], jax.Array]


def _convolution(name: str, layer: nn.Conv2d) -> Layer:
    stride, pads = layer.stride, [(p, p) for p in layer.padding if not isinstance(p, str)]

    def run(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        dims = ("NHWC", "OIHW", "NHWC")
        return jax.lax.conv_general_dilated(x, weights[f"{name}.weight"], stride, pads, dimension_numbers=dims)

    return run


def _batch_norm(name: str, layer: nn.BatchNorm2d) -> Layer:
    def run(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        scale = weights[f"{name}.weight"] * jax.lax.rsqrt(variance + layer.eps)
        return (x - mean) * scale + weights[f"{name}.bias"]

    return run


def _pixel_shuffle(r: int) -> Layer:
    def run(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        n, h, w, c = x.shape
        return x.reshape(n, h, w, c // r**2, r, r).transpose(0, 1, 4, 2, 5, 3).reshape(n, h * r, w * r, c // r**2)

    return run


def _layer(name: str, layer: nn.Module) -> Layer:
    match layer:
        case nn.Conv2d(bias=None):
            return _convolution(name, layer)
        case nn.BatchNorm2d():
            return _batch_norm(name, layer)
        case nn.ReLU():
            return lambda x, weights: jax.nn.relu(x)
        case nn.PixelShuffle():
            return _pixel_shuffle(layer.upscale_factor)
        case nn.Sigmoid():
            return lambda x, weights: jax.nn.sigmoid(x)
    raise TypeError(f"the JAX side has no layer for {name}: {type(layer).__name__}")


def jax_step(workload: Workload) -> Callable[[], None]:
    """The step of `workload` by JAX: loss and all gradients, compiled, NHWC, rows sharded over two devices."""
    model, loss, batch = workload.make()
    assert isinstance(model, nn.Sequential) and isinstance(loss, nn.MSELoss)
    layers = [_layer(name, layer) for name, layer in model.named_children()]
    devices = Mesh(np.array(jax.devices()), ("h",))
    rows, whole = NamedSharding(devices, PartitionSpec(None, "h")), NamedSharding(devices, PartitionSpec())
    x, y = (jax.device_put(t.permute(0, 2, 3, 1).contiguous().numpy(), rows) for t in batch)
    weights = {name: jax.device_put(p.detach().numpy(), whole) for name, p in model.named_parameters()}

    def objective(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        for layer in layers:
            x = layer(x, weights)
        return jnp.square(x - y).mean()

    compiled = jax.jit(jax.value_and_grad(objective))

    def step() -> None:
        jax.block_until_ready(compiled(weights, x, y))

    return step
