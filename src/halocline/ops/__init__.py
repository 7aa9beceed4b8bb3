"""The rules, one file for each family of ops. Importing this package registers them all."""

from . import conv, fallback, pointwise, shape
from .fallback import rule_for

__all__ = ["conv", "fallback", "pointwise", "rule_for", "shape"]
