"""Feeds give every rank its part of the same batches."""

import pytest
import torch
from torch import nn

from halocline.data.mesh_tangling import MeshTangling
from halocline.errors import HaloclineError
from halocline.feed import EPOCH, MeshFeed, feed_of
from halocline.models.zoo import ZOO, Entry
from halocline.region import Region

SMALL = {"mesh-tangling-1k": 32, "resnet-small": 32, "unet3d": 16}


@pytest.mark.parametrize("name", SMALL)
def test_a_part_is_that_of_the_whole(name):
    feed = feed_of(ZOO[name], SMALL[name], 3, 5, torch.float64, seed=1)
    like = feed.like()
    for number in (0, 4):
        whole = feed.whole(number)
        assert [(x.shape, x.dtype) for x in whole] == [(x.shape, x.dtype) for x in like]
        regions = []
        for x in whole:
            intervals = [(0, size) for size in x.shape]
            intervals[0] = (1, 3)
            if x.dim() > 2:
                intervals[2], intervals[-1] = (3, x.shape[2]), (0, 9)
            regions.append(Region(tuple(intervals)))
        for part, x, region in zip(feed.part(number, regions), whole, regions):
            assert torch.equal(part, x[region.within(Region.whole(x.shape))])


def test_meshes_come_in_turn_and_only_the_region_is_made(monkeypatch):
    made = []
    sample = MeshTangling.sample
    monkeypatch.setattr(
        MeshTangling, "sample", lambda self, i, rows, cols: made.append((i, rows, cols)) or sample(self, i, rows, cols)
    )
    feed = MeshFeed(32, 2, 3, torch.float32, seed=0)
    regions = (Region(((0, 2), (0, 18), (8, 16), (0, 32))), Region(((0, 2), (0, 1), (8, 16), (0, 32))))
    for number in range(6):
        feed.part(number, regions)
    assert made == [(i, (8, 16), (0, 32)) for i in (0, 1, 2)]  # each once, for x and y together
    assert torch.equal(feed.part(0, regions)[0], feed.part(3, regions)[0])


def test_batches_of_the_zoo_differ_and_repeat():
    feed = feed_of(ZOO["resnet-small"], 32, 2, 1, torch.float32, seed=0)
    first, second, again = (feed.whole(number)[0] for number in (0, 1, EPOCH))
    assert not torch.equal(first, second) and torch.equal(first, again)


def test_a_model_without_data_is_refused():
    bare = Entry("file.py:bare", lambda size, width: nn.Identity(), None, None, None, None, "")
    with pytest.raises(HaloclineError, match=r"no data to train with.*\(model, loss, batch\)"):
        feed_of(bare, 0, 1, 1, torch.float32, 0)
