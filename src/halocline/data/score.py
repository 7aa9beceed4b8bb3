"""How well scores rank the positives of a target."""

import torch
from torch import Tensor


def average_precision(scores: Tensor, target: Tensor) -> float:
    """Area under the precision-recall curve of `scores` for the 0/1 `target` of the same shape, as a step function.

    AP = sum over thresholds n of (recall_n - recall_{n-1}) precision_n; equal scores share a threshold. Chance gives
    the share of positives. NaN if there are no positives. Raises `ValueError` if the shapes differ.
    """
    if scores.shape != target.shape:
        raise ValueError(
            f"average_precision: scores {tuple(scores.shape)}, target {tuple(target.shape)}; give one shape."
        )
    ordered, order = scores.flatten().sort(descending=True)
    positive = target.flatten()[order].to(torch.float64)
    found = positive.cumsum(0)
    # A threshold is the last of a run of equal scores.
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    found_at, taken_at = found[last], torch.arange(1, len(ordered) + 1, dtype=torch.float64)[last]
    gained = found_at.diff(prepend=found_at.new_zeros(1))
    return float((gained * found_at / taken_at).sum() / positive.sum())
