"""Train an ordinary PyTorch CNN with every sample split over many processes, exactly as one process would."""

from .errors import CaptureError, CommError, HaloclineError, PlanError, SignatureError, StepError

__all__ = ["CaptureError", "CommError", "HaloclineError", "PlanError", "SignatureError", "StepError"]
