"""Average precision against scikit-learn's."""

import math

import pytest
import torch
from sklearn.metrics import average_precision_score

from halocline.data.score import average_precision


@pytest.mark.parametrize("levels", [3, 50, 10**6])
def test_equals_scikit_learn(levels):
    draw = torch.Generator().manual_seed(levels)
    target = (torch.rand(2, 1, 20, 30, generator=draw) < 0.2).float()
    scores = (levels * (torch.rand(target.shape, generator=draw) + 0.3 * target)).floor() / levels
    assert average_precision(scores, target) == pytest.approx(
        average_precision_score(target.flatten(), scores.flatten())
    )


def test_ends():
    target = torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert average_precision(target, target) == 1.0
    assert average_precision(torch.zeros(4), target) == 0.5
    assert math.isnan(average_precision(target, torch.zeros(4)))
    with pytest.raises(ValueError, match="give one shape"):
        average_precision(torch.zeros(3), target)
