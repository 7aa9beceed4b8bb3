"""The rules, one file for each family of ops. Importing this package registers them all."""

from . import concat, conv, fallback, pad, pixel, pointwise, pool, shape
from .fallback import rule_for

__all__ = ["concat", "conv", "fallback", "pad", "pixel", "pointwise", "pool", "rule_for", "shape"]
