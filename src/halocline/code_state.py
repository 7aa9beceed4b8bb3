"""What a model's code depends on besides its tensors: plain attributes, replaced methods, hooks.

Python code is run once, when the model is captured. A step looks before every call whether what that code could see has
changed since, and captures anew where it has.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import is_
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from .watched import is_simple

IGNORED = ("training", "_torchdynamo")  # modes are looked at elsewhere; what torch.compile notes differs by process


class CodeState:
    """Attributes, methods and hooks at one time. Equal ones are the same to the model's code."""

    def __init__(self, items: tuple[tuple[str, Any], ...]) -> None:
        self.items = items
        self._hash = hash(items)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, CodeState) and self.items == other.items)

    def __repr__(self) -> str:
        """The same in every process, as ranks compare it."""
        return "\n".join(f"{name} = {_shown(value)}" for name, value in self.items)


def _shown(value: Any) -> str:
    return repr(value) if is_simple(value) else str(getattr(value, "__qualname__", type(value).__qualname__))


class CodeWatch:
    """Finds the `CodeState` of a model again and again; where nothing has changed that takes a microsecond a module.

    `modules` and `parameters` list what the model has now, by name (without the prefix `model.`).
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._replacements = 0  # a program holds on to modules, so it is for these and no others
        self._tree: list[Any] = []
        self._seen: list[Any] = []
        self._state: CodeState | None = None
        self._list()

    def now(self) -> CodeState:
        """Looks at the model; afterwards `modules` and `parameters` are up to date too."""
        if not _same(self._branches(), self._tree):
            before = [module for _, module in self.modules]
            self._list()
            self._replacements += not _same([module for _, module in self.modules], before)
        seen = self._look()
        if self._state is None or not _same(seen, self._seen):
            items: list[tuple[str, Any]] = [("modules replaced", self._replacements)]
            items += [
                (f"{path or 'model'}.{name}", value) for path, module in self.modules for name, value in _of(module)
            ]
            items += [(f"{cls.__qualname__}.forward", cls.forward) for cls in self._classes]
            self._seen, self._state = seen, CodeState(tuple(items))
        return self._state

    def _list(self) -> None:
        self.modules = list(self._model.named_modules())
        named = self._model.named_parameters(remove_duplicate=False)
        self.parameters = [(name.removeprefix("model."), parameter) for name, parameter in named]
        self._dicts = [module.__dict__ for _, module in self.modules]
        self._children = [held for _, module in self.modules for held in (module._modules, module._parameters)]
        self._hooks = [hooks for _, module in self.modules for hooks in _hooks(module)]
        self._classes: dict[Any, Any] = dict.fromkeys(type(module) for _, module in self.modules)
        self._tree, self._state = self._branches(), None

    def _branches(self) -> list[Any]:
        """The submodules and parameters of every module."""
        return list(chain.from_iterable(map(dict.values, self._children)))

    def _look(self) -> list[Any]:
        """Everything else that may change, as objects that are compared by identity."""
        found = list(chain.from_iterable(map(dict.values, self._dicts)))
        found += [cls.forward for cls in self._classes]
        return (
            found + [hook for hooks in self._hooks if hooks for hook in hooks.values()] if any(self._hooks) else found
        )


def _same(found: list[Any], seen: list[Any]) -> bool:
    return len(found) == len(seen) and all(map(is_, found, seen))


def _hooks(module: nn.Module) -> Sequence[dict[int, Callable[..., Any]]]:
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def _of(module: nn.Module) -> list[tuple[str, Any]]:
    """What decides what the module's code does, by name."""
    found = [
        (name, value)
        for name, value in module.__dict__.items()
        if not name.startswith(IGNORED) and (is_simple(value) or isinstance(value, FunctionType | MethodType | partial))
    ]
    return found + [("hook", hook) for hooks in _hooks(module) for hook in hooks.values()]
