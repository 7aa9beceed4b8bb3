"""The example with Lightning Fabric runs as it is written, and does what one process does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.processes import ROOT

pytest.importorskip("lightning_fabric")


def one_process() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 1, 3, padding=1)
    )
    batches = [(torch.randn(2, 3, 64, 48), torch.randn(2, 1, 32, 24)) for _ in range(5)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def test_fabric_loop(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoint.pt"
    command = [sys.executable, "-m", "halocline.cli.main", "run", "-n", "2", "examples/fabric_loop.py", str(saved)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    losses = [float(found) for found in re.findall(r"rank \d of 2: loss ([\d.]+)", ended.stdout)]
    assert len(losses) == 2 and losses[0] == losses[1] == pytest.approx(one_process(), rel=0.01)
    assert list(torch.load(saved, weights_only=True)["model"])[:2] == ["0.weight", "0.bias"]
