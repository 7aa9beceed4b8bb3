"""K10: no two parts share a dropout mask, replicas do, and the rule by which one process draws the same holds."""

import copy

import torch
from torch import Tensor, nn

from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.ops.dropout import keep_mask, mask_key
from halocline.ops.rule import Noise
from halocline.region import Region
from halocline.step import parallelize


def test_c36_masks_of_parts() -> None:
    x, draws = torch.ones(1, 4, 64, 64), 10

    def rank(comm: Comm) -> list[Tensor]:
        step = parallelize(nn.Dropout(0.5), None, [x], "h=4", comm=comm, seed=7)
        return [step(*step.scatter(x)) for _ in range(draws)]

    parts = run_threads(4, rank)
    masks = [part != 0 for mine in parts for part in mine]
    for number, mask in enumerate(masks):
        assert not any(torch.equal(mask, other) for other in masks[:number])
    kept = sum(float(mask.sum()) for mask in masks) / (draws * x.numel())
    assert abs(kept - 0.5) < 4 * (0.25 / (draws * x.numel())) ** 0.5
    # What one process would draw: a pure function of the seed, the step, the layer and the place in the whole.
    for number in range(draws):
        whole = torch.cat([parts[rank][number] for rank in range(4)], 2)
        key = mask_key(Noise(7, number + 1), "dropout")
        assert torch.equal(whole != 0, keep_mask(Region.whole(x.shape), x.shape, 0.5, key))


def test_masks_do_not_depend_on_the_split() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Dropout2d(0.4), nn.Conv2d(4, 2, 3, padding=1), nn.Dropout(0.3)
    )
    x = torch.randn(4, 2, 9, 8)

    def draw(plan: str) -> object:
        def rank(comm: Comm) -> Tensor:
            step = parallelize(copy.deepcopy(model), None, [x], plan, comm=comm, seed=3)
            return step.gather(step(*step.scatter(x))).detach()

        return rank

    one, *others = (run_threads(ranks, draw(plan))[0] for plan, ranks in (("whole", 1), ("h=3", 3), ("n=2,w=2", 4)))
    assert float((one == 0).float().mean()) > 0.2
    for other in others:
        torch.testing.assert_close(other, one)
