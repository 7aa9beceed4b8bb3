"""PhysicsNeMo's ShardTensor 2.2.2 as a peer: the plain module, its input split over rows on the ranks of a Gloo group.

Three things differ from what the other sides run, all in ShardTensor's favour or for its gradients to be right:

* Batch norms are left out. Their forward pass gathers the whole tensor on every rank, and their backward pass raises
  `AssertionError: placement[0] doesn't have a matching shard in shard_order` (torch 2.13).
* The mean squared error is spelled out, since `nn.MSELoss` yields gradients that are too large by the number of ranks.
* The batch is split before the steps, so that no step pays for `scatter_tensor`, which broadcasts whole samples.

Max pooling whose stride is not its kernel is refused (`MissingShardPatch: Stride must equal kernel_size for pooling
operations`), so ResNets do not run. README.md says what to install, which halocline itself never needs.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import mock

import torch.distributed as dist
from physicsnemo.distributed import DistributedManager
from physicsnemo.domain_parallel import scatter_tensor
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn.modules.batchnorm import _BatchNorm

from halocline.bench.workload import Workload

# What ShardTensor knows of ops beyond DTensor; it loads these by itself only where there is CUDA.
for _module in ("conv_patches", "pooling_patches", "unpooling_patches", "padding", "normalization_patches", "view_ops"):
    import_module(f"physicsnemo.domain_parallel.shard_utils.{_module}")
import_module("physicsnemo.domain_parallel.custom_ops")


def shardtensor_step(workload: Workload) -> tuple[Callable[[], None], list[Tensor]]:
    """The step of `workload` without batch norms, rows split over all ranks, and the leaves that get gradients."""
    mesh = _connect()
    model, loss, batch = workload.make()
    drop_batch_norms(model)
    if isinstance(loss, nn.MSELoss):
        loss = mean_of_squares
    x, target = batch

    def split(whole: Tensor, requires_grad: bool = False) -> Any:
        return scatter_tensor(whole, 0, mesh, (Shard(2),), requires_grad=requires_grad)

    part = split(x, workload.wants_input_gradient)
    wanted = split(target) if target.dim() == x.dim() else target

    def step() -> None:
        loss(model(part), wanted).backward()

    return step, [part, *model.parameters()]


def drop_batch_norms(model: nn.Module) -> None:
    """Puts the identity in place of every batch norm."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm):
                setattr(parent, name, nn.Identity())


def mean_of_squares(output: Tensor, target: Tensor) -> Tensor:
    """`nn.MSELoss()` in ops whose gradients ShardTensor gets right."""
    return (output - target).square().mean()


def _connect() -> Any:
    """The mesh of all ranks. PhysicsNeMo names a device to `init_process_group`, which takes none that is a CPU."""
    plain = dist.init_process_group

    def without_device(*args: Any, device_id: Any = None, **kwargs: Any) -> None:
        plain(*args, **kwargs)

    with mock.patch.object(dist, "init_process_group", without_device):
        DistributedManager.initialize()
    return DistributedManager().initialize_mesh((dist.get_world_size(),), ("h",))
