"""Where in the user's source something comes from: a node of an exported graph, an error, an assignment."""

import inspect
import linecache
import re
import traceback
from pathlib import Path

import torch
from torch import fx, nn

from .graph import Origin

_TORCH = Path(torch.__file__).parent
_NOT_USERS = (Path(__file__).parent, Path(inspect.__file__).parent)  # this package's own files and Python's


def origin(node: fx.Node) -> Origin:
    """The module path and the last source line outside torch."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = (
        re.sub(r"^(model|loss)\.?", lambda found: "loss." if found[1] == "loss" else "", stack[-1][0]) if stack else ""
    )
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    users = [(file, int(line)) for file, line in lines if _is_users(file)]
    if not users:
        return Origin(module.rstrip("."))
    file, number = users[-1]
    return Origin(module.rstrip("."), _line(file, number))


def where_nested(node: fx.Node, graph_module: fx.GraphModule) -> str:
    """What makes a nested graph, `node` being the attribute that holds it, and the first line in it."""
    (user, *_) = node.users
    inner = getattr(graph_module, str(node.target)).graph.nodes
    places = (origin(place) for place in (user, *inner))
    found = next((place for place in places if place.line), origin(user))
    return f"{found}: `{getattr(user.target, '__name__', user.target)}`"


def line_of_error(error: Exception) -> str:
    """The last line of the user's that an error came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`" if frames else "(no line of the model)"


def line_of_assignment(module: nn.Module, attribute: str) -> str:
    """The last line of the module's class that assigns its attribute."""
    try:
        lines, start = inspect.getsourcelines(type(module))
        file = inspect.getsourcefile(type(module)) or "?"
    except (OSError, TypeError):
        return type(module).__name__
    numbers = [i for i, line in enumerate(lines) if re.search(rf"\.{re.escape(attribute)}\b[^=]*=(?!=)", line)]
    return _line(file, start + numbers[-1]) if numbers else type(module).__name__


def _line(file: str, number: int) -> str:
    return f"{Path(file).name}:{number}: {linecache.getline(file, number).strip()}"


def _is_users(filename: str) -> bool:
    path = Path(filename)
    return "<" not in filename and path.parent not in _NOT_USERS and _TORCH not in path.parents
