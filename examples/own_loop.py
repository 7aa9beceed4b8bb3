"""Your own training loop, with every sample split over the ranks: `halocline run -n 2 examples/own_loop.py`."""

import torch
from torch import nn

import halocline as hc

torch.manual_seed(0)  # every rank must build the same weights
model = nn.Sequential(nn.Conv2d(3, 8, 5, padding=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
x = torch.randn(4, 3, 96, 64)  # a whole batch: 4 pictures of 96 x 64
y = x.mean(1, keepdim=True)

step = hc.parallelize(model, loss=nn.MSELoss(), batch=(x, y), plan="spatial")
optimizer = torch.optim.Adam(step.parameters(), lr=1e-2)
for _ in range(20):
    loss = step(*step.scatter(x, y))  # the global loss, the same on every rank
    loss.backward()  # the global gradients, the same on every rank
    optimizer.step()
    optimizer.zero_grad()

print(f"rank {step.comm.rank} of {step.comm.size} computed rows {step.regions[0].intervals[2]}, loss {loss:.6f}")
