"""There is something to learn in the mesh-tangling data, and a net whose samples are split over ranks learns it."""

import copy

import torch
from torch import Tensor, nn

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.data.mesh_tangling import MeshTangling
from halocline.models.mesh_tangling import mini_mesh
from halocline.step import parallelize

SIZE, BATCH, STEPS, UNSEEN = 64, 4, 60, 16


def batch_of(data: MeshTangling, start: int, count: int) -> tuple[Tensor, Tensor]:
    samples = [data[(start + k) % len(data)] for k in range(count)]
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def test_split_training_beats_the_best_constant_prediction_on_unseen_meshes() -> None:
    seen, unseen = MeshTangling(SIZE, 40, seed=1), MeshTangling(SIZE, UNSEEN, seed=2)
    x_unseen, y_unseen = batch_of(unseen, 0, UNSEEN)
    batches = [batch_of(seen, BATCH * k, BATCH) for k in range(10)]
    torch.manual_seed(0)
    model = mini_mesh(SIZE, (32,))

    def rank(comm: Comm) -> tuple[list[float], float]:
        step = parallelize(copy.deepcopy(model), nn.MSELoss(), batches[0], "spatial", comm=comm)
        optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)
        losses = []
        for number in range(STEPS):
            optimizer.zero_grad()
            loss = step(*step.scatter(*batches[number % len(batches)]))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        step.eval()
        with torch.no_grad():
            return losses, step(*step.scatter(x_unseen, y_unseen)).item()

    (losses, loss), (other_losses, other_loss) = run_threads(2, rank)
    best_constant = y_unseen.var(correction=0).item()
    assert (losses, loss) == (other_losses, other_loss)
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5]), losses
    assert loss < 0.65 * best_constant, f"{loss:.3f}, where the best constant has {best_constant:.3f}"
