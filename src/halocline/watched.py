"""What tracing would drop without a word: hooks, gradients of one's own, attributes that change from step to step.

A graph holds what ops compute. Code that does something else runs while the model is captured, and never again; here it
is noticed, and refused where the step would not be what one process does.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.fx._symbolic_trace import _Patcher
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from .errors import CaptureError
from .source import line_of_assignment

Place = tuple[str, str]  # of an attribute: the module's path and the name
SIMPLE = (bool, int, float, str, type(None))
MISSING = object()


def kept(whole: nn.Module) -> dict[Place, Any]:
    """The attributes of every module that are numbers, texts, tuples of them, or tensors but no parameters."""
    # By path: while a model with a module used twice is traced, a module is another object each time it is looked at.
    return {
        (path, name): value
        for path, module in whole.named_modules()
        for name, value in module.__dict__.items()
        if isinstance(value, Tensor) or is_simple(value)
    }


def is_simple(value: Any) -> bool:
    """Whether a value is a number, a text, None, or a tuple of such."""
    return isinstance(value, SIMPLE) or (isinstance(value, tuple) and all(isinstance(item, SIMPLE) for item in value))


def changes(before: Mapping[Place, Any], after: Mapping[Place, Any]) -> dict[Place, Any]:
    """The attributes that are new or other afterwards, with their values then."""
    found = {}
    for place, value in after.items():
        old = before.get(place, MISSING)
        if old is not value and (isinstance(value, Tensor) or isinstance(old, Tensor) or old != value):
            found[place] = value
    return found


def put_back(whole: nn.Module, before: Mapping[Place, Any], changed: Mapping[Place, Any]) -> None:
    """Gives changed attributes the values they had."""
    for path, name in changed:
        module = whole.get_submodule(path)
        if (path, name) in before:
            module.__dict__[name] = before[path, name]
        else:
            module.__dict__.pop(name, None)


def put_as_left(whole: nn.Module, changed: Mapping[Place, Any]) -> None:
    """Gives changed attributes the values that a forward pass left; tensors only the shape."""
    for (path, name), value in changed.items():
        left = torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value
        whole.get_submodule(path).__dict__[name] = left


def check_steady(whole: nn.Module, first: Mapping[Place, Any], second: Mapping[Place, Any], same_graph: bool) -> None:
    """Raises CaptureError where attributes that a forward pass changes would decide what the next one does.

    `first` and `second` are the changes by two forward passes in a row. A number that goes on changing is refused even
    if the two graphs are the same: it would stand still.
    """
    going_on = [place for place, value in second.items() if place in first and not isinstance(value, Tensor)]
    if same_graph and not going_on:
        return
    path, name = (going_on or list(first))[0]
    raise CaptureError(
        f"the model cannot be captured: {line_of_assignment(whole.get_submodule(path), name)}: `{name}` changes in "
        "every forward pass, outside the graph, and would not in a step. A tensor: register it as a buffer, or return "
        "it. A number: change it in the training loop; a step notices that."
    )


@contextmanager
def nothing_dropped(model: nn.Module) -> Iterator[None]:
    """Within, tracing `model` raises CaptureError for what it would drop; checkpoints are traced as plain calls."""
    thread = threading.get_ident()
    applied, registered = Function.__dict__["apply"], Tensor.register_hook

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            if cls is CheckpointFunction:  # recomputation is the plan's business, and would hide its gradient
                return args[0](*args[2:])
            if not cls.__module__.startswith("torch."):
                _check_gradient(cls, args)
        return applied.__func__(cls, *args, **kwargs)

    def register_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        if threading.get_ident() == thread:
            raise CaptureError(
                "the model cannot be captured: it registers a hook on the gradient of an activation, which would never "
                "be called. Hooks on parameters are; for others compute what the hook does in the loss."
            )
        return registered(tensor, hook)

    Function.apply, Tensor.register_hook = classmethod(apply), register_hook  # type: ignore[assignment,method-assign]
    try:
        with _hooks_noticed(model), _in_this_thread_only():
            yield
    finally:
        Function.apply, Tensor.register_hook = applied, registered  # type: ignore[method-assign]


@contextmanager
def _in_this_thread_only() -> Iterator[None]:
    """A tracer patches how every module of the process is called: other ranks that are threads here go on as before."""
    thread, patch_method = threading.get_ident(), _Patcher.patch_method

    def patch(patcher: Any, cls: type, name: str, new: Callable[..., Any], deduplicate: bool = True) -> None:
        old = getattr(cls, name)

        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (new if threading.get_ident() == thread else old)(*args, **kwargs)

        patch_method(patcher, cls, name, chosen, deduplicate)

    _Patcher.patch_method = patch  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        _Patcher.patch_method = patch_method  # type: ignore[method-assign]


# Whose hooks may return nothing: they hand tensors to code of the forward pass itself, where they are captured.
PART_OF_THE_MODEL = ("torch.", "transformers.")


@dataclass
class _Noticed:
    """A forward hook that notes whether it ever returned something."""

    hook: Callable[..., Any]
    where: str
    returned: bool = False
    called: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.hook(*args, **kwargs)
        self.called, self.returned = True, self.returned or result is not None
        return result


@contextmanager
def _hooks_noticed(model: nn.Module) -> Iterator[None]:
    """What a forward hook returns is in the graph. One that only looks on would look once, backward hooks never.

    Hooks that the forward pass itself installs are taken off again, as attributes are put back: it installs them anew.
    """
    noticed: list[tuple[dict[int, Any], int, _Noticed]] = []
    all_hooks = [hooks for module in model.modules() for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    installed = [(hooks, set(hooks)) for hooks in all_hooks]
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"`{path or 'the model'}` has a backward hook, which would never be called: the backward pass is that "
                "of the captured graph. Remove it; hooks on parameters are called."
            )
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                if not str(getattr(hook, "__module__", type(hook).__module__)).startswith(PART_OF_THE_MODEL):
                    noticed.append((hooks, key, _Noticed(hook, path or "the model")))
    for hooks, key, wrapper in noticed:
        hooks[key] = wrapper
    try:
        yield
    finally:
        for hooks, key, wrapper in noticed:
            hooks[key] = wrapper.hook
        for hooks, keys in installed:
            for key in set(hooks) - keys:
                del hooks[key]
    for _, _, wrapper in noticed:
        if wrapper.called and not wrapper.returned:
            raise CaptureError(
                f"`{wrapper.where}` has a forward hook `{getattr(wrapper.hook, '__qualname__', wrapper.hook)}` that "
                "returns nothing: it would be called when the model is captured, not in every step. Remove it; "
                "step.values_of(...) shows every activation."
            )


def _check_gradient(function: type[Function], args: tuple[Any, ...]) -> None:
    """Raises CaptureError unless the function's own backward is the derivative of its forward, as the graph has it."""
    with ThreadPoolExecutor(1) as pool:  # a thread of its own has no tracing going on
        for shrunk in (True, False):
            if pool.submit(_is_derivative, function, args, shrunk).result():
                return
    raise CaptureError(
        f"the model cannot be captured: the gradient that `{function.__name__}.backward` gives is not the derivative "
        "of its forward, or cannot be compared with it; a step would compute the derivative. Write it with detach(), "
        "as in `x + (y - x).detach()`."
    )


def _is_derivative(function: type[Function], args: tuple[Any, ...], shrunk: bool) -> bool:
    sizes = sorted({size for x in pytree.tree_leaves(args) if isinstance(x, Tensor) for size in x.shape if size > 8})
    small = {size: 9 + i for i, size in enumerate(sizes)} if shrunk else {}
    generator = torch.Generator().manual_seed(0)

    def real(argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        shape = [small.get(size, size) for size in argument.shape]
        if not argument.is_floating_point():
            return torch.zeros(shape, dtype=argument.dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    try:
        if not shrunk and sum(x.numel() for x in pytree.tree_leaves(args) if isinstance(x, Tensor)) > 1 << 22:
            return False
        given = pytree.tree_map(real, args)
        found = [_gradients(run, given) for run in (function.apply, _forward_of(function))]
        return all(
            (a is None) == (b is None) and (a is None or torch.allclose(a, b, 1e-6, 1e-9)) for a, b in zip(*found)
        )
    except Exception:  # whatever the user's code raises: it cannot be compared
        return False


def _forward_of(function: type[Function]) -> Callable[..., Any]:
    """The function's forward as plain differentiable code."""
    if function.setup_context is not Function.setup_context:
        return function.forward  # type: ignore[no-any-return]
    nothing = {name: lambda *args: None for name in ("save_for_backward", "mark_dirty", "mark_non_differentiable")}
    return lambda *args: function.forward(SimpleNamespace(**nothing, set_materialize_grads=lambda value: None), *args)


def _gradients(run: Callable[..., Any], args: Any) -> list[Tensor | None]:
    """The gradients of a random combination of what `run` returns, after the values themselves."""
    leaves = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor) and x.requires_grad]
    copies = iter([x.detach().clone().requires_grad_() for x in leaves])
    fresh = pytree.tree_map(lambda x: next(copies) if isinstance(x, Tensor) and x.requires_grad else x, args)
    wanted = [x for x in pytree.tree_leaves(fresh) if isinstance(x, Tensor) and x.requires_grad]
    outputs = [x for x in pytree.tree_leaves(run(*fresh)) if isinstance(x, Tensor)]
    generator = torch.Generator().manual_seed(1)
    total = sum(
        ((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in outputs if x.requires_grad),
        torch.zeros(()),
    )
    grads = torch.autograd.grad(total, wanted, allow_unused=True) if total.requires_grad else [None] * len(wanted)
    return [x.detach().double() for x in outputs] + list(grads)
