"""ShardTensor as a peer: it takes part only where it is installed, and then with the gradients of one process."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from halocline.bench import peers
from halocline.bench.race import race
from halocline.bench.workload import Workload
from halocline.comm.launch import launch

SMALL = {
    "mini-mesh": Workload("mini-mesh", 64, 0.25, 2),
    "unet2d": Workload("unet2d", 64, 0.25, 2),
    "mesh2k-conv1_1": Workload("layer:mesh2k-conv1_1", 64),
}

RANK = """
import torch
from physicsnemo.distributed import DistributedManager
from halocline.bench.shardtensor_side import shardtensor_step
from halocline.bench.workload import Workload

torch.set_num_threads(1)
for name, workload in {workloads!r}.items():
    step, leaves = shardtensor_step(Workload(**workload))
    step()
    gradients = [leaf.grad.full_tensor() if hasattr(leaf.grad, "full_tensor") else leaf.grad for leaf in leaves]
    torch.save(gradients, f"{directory}/{{name}}-{{torch.distributed.get_rank()}}.pt")
DistributedManager.cleanup()  # threads of Gloo that are left when Python ends may abort the process
"""


def test_sides_name_what_shardtensor_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert not any(side.kind == "shardtensor" for net in peers.NETS.values() for side in peers.sides_of(net))
    assert not any(side.kind == "shardtensor" for layer in peers.MICRO.values() for side in peers.micro_sides(layer))
    monkeypatch.setattr(peers, "find_spec", lambda name: object() if name == "physicsnemo" else None)
    for name, net in peers.NETS.items():
        sides = [side.name for side in peers.sides_of(net) if side.kind == "shardtensor"]
        assert sides == ([] if name == "resnet50" else ["ShardTensor, 2 ranks, no batch norm"])
    for layer in peers.MICRO.values():
        assert [side.name for side in peers.micro_sides(layer)][-1] == "ShardTensor, 2 ranks"


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("physicsnemo", reason="ShardTensor is not installed")
    script = tmp_path / "rank.py"
    workloads = {name: workload.__dict__ for name, workload in SMALL.items()}
    script.write_text(RANK.format(workloads=workloads, directory=tmp_path))
    assert launch([sys.executable, str(script)], 2, "gloo", threads=1) == 0
    for name, workload in SMALL.items():
        wanted = _gradients(workload)
        for rank in range(2):
            found = torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True)
            assert [a is None for a in found] == [b is None for b in wanted]
            for a, b in zip(found, wanted):
                assert a is None or (a - b).abs().max() <= 2e-5 * b.abs().max(), name


def test_it_takes_its_turns_in_a_race() -> None:
    pytest.importorskip("physicsnemo", reason="ShardTensor is not installed")
    sides = (peers.ONE_PROCESS[0], peers.SHARDTENSOR)
    one, split = race(sides, Workload("layer:small"), rounds=1, steps=2)
    assert len(one.seconds) == len(split.seconds) == 2
    assert min(split.seconds) > 0


def _gradients(workload: Workload) -> list[torch.Tensor | None]:
    model, loss, (x, target) = workload.make()
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())
    x.requires_grad_(workload.wants_input_gradient)
    loss(model(x), target).backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]
