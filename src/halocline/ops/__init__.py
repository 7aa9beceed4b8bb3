"""The rules, one file for each family of ops. Importing this package registers them all."""

from . import (
    adaptive_pool,
    batch_norm,
    concat,
    conv,
    expand,
    fallback,
    linear,
    matmul,
    pad,
    pixel,
    pointwise,
    pool,
    shape,
    slice,
)
from .fallback import rule_for

__all__ = [
    "adaptive_pool",
    "batch_norm",
    "concat",
    "conv",
    "expand",
    "fallback",
    "linear",
    "matmul",
    "pad",
    "pixel",
    "pointwise",
    "pool",
    "rule_for",
    "shape",
    "slice",
]
