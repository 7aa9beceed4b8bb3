"""Every model of the zoo takes its own input; files give entries; wrong requests are told what to do."""

import pytest
import torch
from torch import nn

from halocline.errors import HaloclineError
from halocline.models.zoo import ZOO, load

SMALL = {
    "mesh-tangling-1k": 64,
    "mesh-tangling-2k": 128,
    "mini-mesh": 32,
    "resnet50": 64,
    "resnet50-torch": 64,
    "resnet152": 64,
    "resnet-small": 32,
    "unet2d": 32,
    "unet3d": 16,
    "cosmoflow": 32,
}


def test_names():
    assert set(ZOO) == set(SMALL)
    assert all(name == entry.name for name, entry in ZOO.items())


@pytest.mark.parametrize("name", SMALL)
def test_a_small_step_down_the_gradient_lowers_the_loss(name):
    entry = load(name)
    torch.manual_seed(0)
    model = entry.build(SMALL[name], 0.1).double()
    batch = entry.batch(SMALL[name], 2, 3)
    assert len(batch[0]) == 2 and torch.equal(batch[0], entry.batch(SMALL[name], 2, 3)[0])
    x, y = (t.double() if t.is_floating_point() else t for t in batch)
    before = entry.loss()(model(x), y)
    before.backward()
    steepness = sum(p.grad.square().sum() for p in model.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p -= 1e-6 * before / steepness * p.grad
        after = entry.loss()(model(x), y)
    assert 0.5e-6 < (before - after) / before < 1.5e-6


@pytest.mark.parametrize("name", SMALL)
def test_usual_sizes_build(name):
    entry = ZOO[name]
    with torch.device("meta"):
        entry.build(entry.size, 1.0)


FILE = """
import torch
from torch import nn
from neighbour import CHANNELS

class Net(nn.Sequential):
    pass

def bare():
    return Net(nn.Conv2d(CHANNELS, 1, 3))

def whole():
    return bare(), nn.MSELoss(), (torch.zeros(2, CHANNELS, 8, 8), torch.ones(2, 1, 6, 6))

def number():
    return 7

def pair():
    return bare(), nn.MSELoss()

def broken():
    raise RuntimeError("no such device")
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "neighbour.py").write_text("CHANNELS = 3\n")
    (tmp_path / "own_net.py").write_text(FILE)
    return tmp_path / "own_net.py"


def test_a_file_gives_an_entry(file):
    entry = load(f"{file}:whole")
    one, other = entry.build(0, 1.0), entry.build(0, 1.0)
    assert type(one).__name__ == "Net" and one is not other
    torch.testing.assert_close(one.state_dict(), other.state_dict())
    x, y = entry.batch(0, 0, 0)
    assert entry.loss()(one(x), y) > 0
    assert (entry.size, entry.batch_size) == (None, None)

    bare = load(f"{file}:bare")
    assert isinstance(bare.build(0, 1.0), nn.Module)
    assert bare.loss is None and bare.batch is None


@pytest.mark.parametrize(
    "factory, text",
    [
        ("number", "the factory returned int. It must return an nn.Module, or"),
        ("pair", r"the factory returned \(Net, MSELoss\)"),
        ("broken", r"broken\(\) failed with RuntimeError: no such device"),
        ("missing", "has no function 'missing'. It has Net, bare, whole, number, pair, broken"),
    ],
)
def test_files_that_do_not_give_a_model(file, factory, text):
    with pytest.raises(HaloclineError, match=text):
        load(f"{file}:{factory}")


def test_wrong_names(tmp_path):
    with pytest.raises(HaloclineError, match=r"no model called 'resnet51'. Known are mesh-tangling-1k, .*factory"):
        load("resnet51")
    with pytest.raises(HaloclineError, match=r"there is no file .*nothing.py"):
        load(f"{tmp_path}/nothing.py:f")
    (tmp_path / "bad.py").write_text("import no_such_module_at_all\n")
    with pytest.raises(HaloclineError, match="failed with ModuleNotFoundError"):
        load(f"{tmp_path}/bad.py:f")
