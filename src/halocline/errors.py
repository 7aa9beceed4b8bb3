"""What halocline raises.

HaloclineError
├── CaptureError      the model cannot be captured as a graph
├── PlanError         a split that does not exist, or cannot be used here
├── SignatureError    the batch, or the ranks, are not what the plan was made for
├── StepError         the step was used in a way that has no right answer
└── CommError         another rank failed, is late, or cannot be reached
"""


class HaloclineError(Exception):
    """Every error of halocline. Its text says what was asked, what was found, where, and what to do."""


class CaptureError(HaloclineError):
    """The model cannot be captured as a graph at global shapes."""


class PlanError(HaloclineError):
    """A split that does not exist or that these ranks cannot use."""


class SignatureError(HaloclineError):
    """A batch or a set of ranks that does not fit what was planned."""


class StepError(HaloclineError):
    """A step used in a way that has no right answer (second backward, non-scalar loss, ...)."""


class CommError(HaloclineError):
    """Another rank failed, is late, or cannot be reached."""
