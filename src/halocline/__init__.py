"""Train an ordinary PyTorch CNN with every sample split over many processes, exactly as one process would."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .errors import CaptureError, CommError, HaloclineError, PlanError, SignatureError, StepError

if TYPE_CHECKING:
    from .comm.connect import connect
    from .comm.launch import launch
    from .mesh import Mesh
    from .placement import Plan
    from .region import Region
    from .step import Step, parallelize
    from .verify import Report, verify

# Found when first used: the command line should not wait for torch to say how it is called.
_HOMES = {
    "Mesh": "mesh", "Plan": "placement", "Region": "region", "Report": "verify", "Step": "step",
    "connect": "comm.connect", "launch": "comm.launch", "parallelize": "step", "verify": "verify",
}  # fmt: skip

__all__ = [
    "CaptureError",
    "CommError",
    "HaloclineError",
    "Mesh",
    "Plan",
    "PlanError",
    "Region",
    "Report",
    "SignatureError",
    "Step",
    "StepError",
    "connect",
    "launch",
    "parallelize",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps the function `verify` from being hidden by the module of that name once that is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
