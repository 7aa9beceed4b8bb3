"""Lightning Fabric around a step: its precision, its backward, clipping and checkpoints, with samples split over ranks.

`pip install lightning-fabric`, then `halocline run -n 2 examples/fabric_loop.py`. Fabric sees one device in every
process; how the ranks share a sample is the step's business.
"""

import sys
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch import nn

import halocline as hc

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 1, 3, padding=1)
)
batches = [(torch.randn(2, 3, 64, 48), torch.randn(2, 1, 32, 24)) for _ in range(5)]

fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
step = hc.parallelize(model, loss=nn.MSELoss(), plan="spatial")
optimizer = fabric.setup_optimizers(torch.optim.AdamW(step.parameters(), lr=1e-2))
for x, y in batches:
    with fabric.autocast():  # around scatter too: the plan is for the precision in which the step runs
        loss = step(*step.scatter(x, y))
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {step.comm.rank} of {step.comm.size}: loss {loss.item():.6f}")

if step.comm.rank == 0 and len(sys.argv) > 1:  # a checkpoint has the names of the plain model
    fabric.save(Path(sys.argv[1]), {"model": model, "optimizer": optimizer})
