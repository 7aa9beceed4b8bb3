"""The races: one convolution at a time (`micro`), and whole nets against one process and DDP (`peers`)."""

from dataclasses import replace
from importlib.util import find_spec

from halocline.bench.race import Side
from halocline.bench.workload import Workload

ONE_PROCESS = tuple(
    Side(f"one process, {threads} thread{'s' if threads > 1 else ''}, {name}", "plain", 1, threads, last, tuned)
    for threads in (1, 2)
    for name, last, tuned in (
        ("as installed", False, False),
        ("channels last", True, False),
        ("tuned", False, True),
        ("channels last, tuned", True, True),
    )
)
SPLIT = (
    Side("halocline, 2 ranks, MPI", "halocline", 2),
    Side("halocline, 2 ranks, Gloo", "halocline", 2, transport="gloo"),
)
JAX = Side("JAX, 2 devices", "jax", threads=2)
SHARDTENSOR = Side("ShardTensor, 2 ranks", "shardtensor", 2)
SHARDTENSOR_NET = replace(SHARDTENSOR, name="ShardTensor, 2 ranks, no batch norm")  # it fails in their backward
DDP = Side("DDP, 2 ranks, Gloo", "ddp", 2, channels_last=True)

MICRO = {
    "small": Workload("layer:small"),
    "resnet50-conv1": Workload("layer:resnet50-conv1", batch=2),
    "resnet50-res3b_branch2a": Workload("layer:resnet50-res3b_branch2a", batch=2),
    "mesh2k-conv1_1": Workload("layer:mesh2k-conv1_1", size=1024),
    "mesh2k-conv6_1": Workload("layer:mesh2k-conv6_1"),
}
NETS = {
    "mini-mesh-512": Workload("mini-mesh", 512),
    "mini-mesh-1024": Workload("mini-mesh", 1024),
    "mesh-tangling-1k": Workload("mesh-tangling-1k", 512, 0.25),
    "resnet50": Workload("resnet50", 224, batch=2),
    "unet2d": Workload("unet2d", 512, 0.5),
}


def sides_of(workload: Workload, gloo: bool = True) -> tuple[Side, ...]:
    """One process in all its settings, halocline, DDP where each rank gets a sample, and the peers that are installed.

    JAX runs chains of convolutions, ShardTensor all but ResNets, whose max pooling it refuses.
    """
    split = SPLIT if gloo else SPLIT[:1]
    jax = (JAX,) if "mesh" in workload.name and find_spec("jax") is not None else ()
    sharded = (SHARDTENSOR_NET,) if workload.name != "resnet50" and find_spec("physicsnemo") is not None else ()
    return (*ONE_PROCESS, *split, *((DDP,) if workload.batch >= 2 else ()), *jax, *sharded)


def micro_sides(workload: Workload) -> tuple[Side, ...]:
    """One process at its best with one and two threads, each split that the layer's batch allows, and ShardTensor."""
    plans = ["spatial", "w=2"] + (["sample"] if workload.batch >= 2 else [])
    best = tuple(side for side in ONE_PROCESS if side.name.endswith("channels last, tuned"))
    sharded = (SHARDTENSOR,) if find_spec("physicsnemo") is not None else ()
    return (*best, *(Side(f"halocline, 2 ranks, {plan}", "halocline", 2, plan=plan) for plan in plans), *sharded)
