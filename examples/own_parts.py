"""Samples too large for one process: each rank makes or reads only the region it owns, and gathers no output.

`halocline run -n 2 examples/own_parts.py`
"""

import torch
from torch import nn

import halocline as hc


def read(region: hc.Region) -> torch.Tensor:
    """The part of the sample in `region`. Here a formula; yours reads a slice of a file."""
    _, _, rows, columns = (torch.arange(start, stop, dtype=torch.float32) for start, stop in region.intervals)
    return (0.1 * rows[:, None] + 0.2 * columns[None, :]).sin()[None, None]


torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 1, 3, padding=1))
like = torch.empty(1, 1, 512, 512), torch.empty(1, 1, 256, 256)  # shapes and dtypes; what is in them is not read

step = hc.parallelize(model, loss=nn.MSELoss(), batch=like, plan="spatial")
optimizer = torch.optim.SGD(step.parameters(), lr=0.1, momentum=0.9)
x_region, y_region = step.regions
x, y = read(x_region), read(y_region)
for _ in range(5):
    loss = step(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {step.comm.rank} of {step.comm.size} holds {x_region} of the sample, loss {loss:.6f}")

# Without a loss the step returns this rank's part of the output.
look = hc.parallelize(model.eval(), batch=like[:1], plan="spatial")
with torch.no_grad():
    part = look(x)
print(f"rank {step.comm.rank} holds {tuple(part.shape)} of an output of {tuple(look.gather(part).shape)}")
