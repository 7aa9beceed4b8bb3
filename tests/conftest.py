"""Fixtures that several test files use."""

import pytest
import torch

from tests.small_net import Net


@pytest.fixture
def net() -> Net:
    """`Net` in fp64, the same for every test."""
    torch.manual_seed(0)
    return Net().double()
