"""Pictures and volumes: form, repeatability, and that there is something to learn."""

import sys

import pytest
import torch

from halocline.data.images import digits, synthetic_imagenet
from halocline.data.volumes import Bodies, DensityFields
from halocline.errors import HaloclineError


def test_digits():
    data = digits(32, seed=1)
    x, label = data[0]
    assert len(data) == 1797 and x.shape == (1, 32, 32) and x.dtype == torch.float32
    assert label.dtype == torch.int64 and set(data.tensors[1].tolist()) == set(range(10))
    assert data.tensors[0].min() == 0 and data.tensors[0].max() <= 1
    assert torch.equal(x, digits(32, seed=1)[0][0])
    assert not torch.equal(data.tensors[1], digits(32, seed=2).tensors[1])
    with pytest.raises(ValueError, match="size 4"):
        digits(4)


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(HaloclineError, match=r"pip install 'halocline\[data\]'"):
        digits(32)


@pytest.mark.parametrize(
    "make, x_shape, y_shape",
    [
        (lambda seed: synthetic_imagenet(40, 7, seed), (3, 40, 40), ()),
        (lambda seed: Bodies(24, 2, 9, seed), (1, 24, 24), (1, 24, 24)),
        (lambda seed: Bodies(12, 3, 9, seed), (1, 12, 12, 12), (1, 12, 12, 12)),
        (lambda seed: DensityFields(16, 9, seed), (4, 16, 16, 16), (4,)),
    ],
)
def test_an_item_depends_on_seed_and_index_alone(make, x_shape, y_shape):
    x, y = make(3)[5]
    assert x.shape == x_shape and y.shape == y_shape
    make(3)[0], torch.rand(5)
    assert torch.equal(x, make(3)[5][0]) and torch.equal(y, make(3)[5][1])
    assert not torch.equal(x, make(3)[6][0])
    assert not torch.equal(x, make(4)[5][0])


def test_pictures_of_a_class_have_its_colour():
    data = synthetic_imagenet(32, 2, seed=0)
    strength = {0: [], 1: []}
    for i in range(40):
        x, label = data[i]
        strength[int(label)].append(x.std((1, 2)))
    zero, one = (torch.stack(strength[c]).mean(0) for c in (0, 1))
    assert min(len(v) for v in strength.values()) > 10
    assert (zero - one).abs().max() > 0.1


def test_bodies_are_brighter():
    x, mask = Bodies(48, 2, 1)[0]
    assert 0.02 < mask.mean() < 0.7
    assert x[mask == 1].mean() - x[mask == 0].mean() > 0.8


def test_amplitude_is_in_the_density_field():
    items = [DensityFields(12, 60, 1)[i] for i in range(60)]
    ratio = torch.tensor([float(x[3].std() / x[0].std()) for x, _ in items])
    growth = torch.tensor([float(y[2]) for _, y in items])
    torch.testing.assert_close(ratio, (1.2 + 0.2 * growth) ** 3, rtol=1e-4, atol=1e-4)


def test_refusals():
    for make, text in (
        (lambda: synthetic_imagenet(0, 5), "size 0"),
        (lambda: Bodies(8, 4, 1), "dims 4"),
        (lambda: DensityFields(1, 1), "size 1"),
    ):
        with pytest.raises(ValueError, match=text):
            make()
    with pytest.raises(IndexError, match="item 1"):
        Bodies(8, 2, 1)[1]
