"""An op without a rule is said once, by its name, its module and its line."""

import copy
import re
import warnings

import pytest
import torch
from torch import Tensor, nn

from halocline import notice
from halocline.comm.comm import Comm
from halocline.comm.threads import run_threads
from halocline.notice import WholeOpWarning
from halocline.verify import verify


class Unusual(nn.Module):
    """Inverts two matrices for every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x) + 4 * torch.eye(6, dtype=x.dtype)
        return torch.linalg.inv(y) + torch.linalg.inv(y + 1)


def test_ops_without_a_rule_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_said", set())
    torch.manual_seed(0)
    model, batch = Unusual().double(), tuple(torch.randn(2, 1, c, 6, 6, dtype=torch.float64)[0] for c in (2, 3))

    def rank(comm: Comm) -> bool:
        return verify(copy.deepcopy(model), nn.MSELoss(), batch, "spatial", comm=comm).passed

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert all(run_threads(2, rank)) and all(run_threads(3, rank))
    (said,) = [str(w.message) for w in caught if issubclass(w.category, WholeOpWarning)]
    assert re.search(r"linalg_inv.*test_notice.py:\d+: return torch.linalg.inv.*and 1 more: no rule says", said), said
