"""All ranks agree before any data moves, or all stop with an error that says what differs."""

import hashlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .comm.comm import Comm
from .errors import CaptureError, HaloclineError, PlanError, SignatureError, StepError

Result = TypeVar("Result")
KINDS = {kind.__name__: kind for kind in (CaptureError, PlanError, SignatureError, StepError)}


def together(comm: Comm, what: str, make: Callable[[], Result]) -> Result:
    """`make()`, unless it raises on any rank: then every rank raises, naming the rank and the cause."""
    made: Result | None = None
    error: Exception | None = None
    try:
        made = make()
    except Exception as raised:
        error = raised
    failures = comm.all_gather_object(None if error is None else (type(error).__name__, str(error)))
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            kind, text = failure
            raise KINDS.get(kind, HaloclineError)(f"rank {rank} stopped at {what}: {kind}: {text}")
    return made  # type: ignore[return-value]


def agree(comm: Comm, facts: Mapping[str, str]) -> None:
    """Raises SignatureError, on every rank, for the first fact that is not the same everywhere.

    Ranks that are about to do different things may state other facts, as long as the first one tells them apart.
    """
    digests = {what: hashlib.blake2b(fact.encode(), digest_size=16).hexdigest() for what, fact in facts.items()}
    everyone = comm.all_gather_object(digests)
    for what in facts:
        if any(other.get(what) != everyone[0].get(what) for other in everyone):
            shown = comm.all_gather_object(facts[what])
            groups: dict[str, list[int]] = {}
            for rank, fact in enumerate(shown):
                groups.setdefault(fact, []).append(rank)
            (first, at_first), (second, at_second), *_ = groups.items()
            raise SignatureError(
                f"the ranks disagree on {what}: {_ranks(at_first)} {_apart(first, second)}, "
                f"{_ranks(at_second)} {_apart(second, first)}. Every rank must do the same, with the "
                "same model and weights, on the same global batch."
            )


def digest(value: object) -> int:
    """A number, never negative, for what `value` prints: the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest()) >> 2


def everywhere(comm: Comm, number: int) -> bool:
    """Whether `number` is the same on every rank, which all of them learn. One small reduction: cheap beside a step."""
    if comm.size == 1:
        return True
    extremes = torch.tensor([number, -number])
    comm.all_reduce(extremes, tuple(range(comm.size)), "max").wait()
    return bool(extremes.tolist() == [number, -number])


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"


def _apart(text: str, other: str) -> str:
    """The first line in which `text` differs from `other`, shortened."""
    lines, others = text.splitlines(), other.splitlines()
    differing = next(
        (a for a, b in zip(lines, others) if a != b), lines[len(others)] if len(lines) > len(others) else ""
    )
    return f"`{differing[:160]}`" if differing else "(nothing)"


def fingerprint(module: nn.Module) -> str:
    """A line for every module: name and class; and for every parameter and buffer: shape, dtype, digest of values."""
    classes = [f"{name}: {type(part).__qualname__}" for name, part in module.named_modules()]
    tensors = (*module.named_parameters(), *module.named_buffers())
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        raise StepError(
            f"`{lazy[0]}` has no shape yet: it belongs to a lazy module. Call the model once, on a small batch, before."
        )
    if empty := [name for name, tensor in tensors if tensor.is_meta]:
        raise StepError(
            f"`{empty[0]}` is on the meta device, so it has no values to run with. Give the model some before: "
            "model.to_empty(device=...), then load_state_dict."
        )
    lines = [f"{name}: {tuple(t.shape)} {t.dtype} values {_digest(t)}" for name, t in tensors]
    return "\n".join(classes + lines)


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().reshape(-1).cpu().contiguous()
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=8).hexdigest() if flat.numel() else ""
