"""Makes a case that fails smaller as long as it fails, and writes it down as a test."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from ..mesh import prime_mesh
from .check import Case, Unusable, check
from .layers import Layer
from .net import Recipe

TRIES = 300
PLAINER = {"stride": 1, "dilation": 1, "padding": 0, "output_padding": 0, "groups": 1, "padding_mode": "zeros",
           "ceil_mode": False, "bias": False, "inplace": False}  # fmt: skip


def shrunk(case: Case, problem: str, check: Callable[[Case], str | None] = check) -> tuple[Case, str]:
    """The smallest case found on the way that fails in the same kind of way, and what is wrong with it."""
    left, kind = TRIES, problem.split(":")[0].split(" on rank")[0].split(" ")[0]
    smaller = True
    while smaller and left:
        smaller = False
        for candidate in _smaller(case):
            left -= 1
            found = _fails(candidate, check)
            if found is not None and found.startswith(kind):
                case, problem, smaller = candidate, found, True
                break
            if not left:
                break
    return case, problem


def _fails(case: Case, check: Callable[[Case], str | None]) -> str | None:
    try:
        return check(case)
    except (Unusable, RuntimeError, ValueError, IndexError):
        return None


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with a little less: layers, head, size, ranks, choices."""
    recipe = case.recipe
    for i in reversed(range(len(recipe.layers))):
        yield _with(case, replace(recipe, layers=recipe.layers[:i] + recipe.layers[i + 1 :]), dropped=i)
    if recipe.head != "none":
        yield replace(case, recipe=replace(recipe, head="none"))
    for ranks in (2, 3, 4):
        if ranks < case.ranks:
            for index in "nhwd":
                if index in str(case.plan):
                    yield replace(case, ranks=ranks, plan=f"{index}={ranks}")
    if not isinstance(case.plan, str):
        yield replace(case, plan=next(iter(case.plan.values())))
        for key in case.plan:
            yield replace(case, plan={other: phrase for other, phrase in case.plan.items() if other != key})
    for dim, size in enumerate(recipe.shape):
        for less in (size // 2, size - 1):
            if 0 < less < size:
                shape = (*recipe.shape[:dim], less, *recipe.shape[dim + 1 :])
                yield replace(case, recipe=replace(recipe, shape=shape))
    for i, layer in enumerate(recipe.layers):
        for key, plain in PLAINER.items():
            value = layer.given.get(key)
            wanted = (plain,) * len(value) if isinstance(value, tuple) else plain
            if value is not None and value != wanted:
                plainer = Layer(layer.kind, {**layer.given, key: wanted})
                yield replace(
                    case, recipe=replace(recipe, layers=(*recipe.layers[:i], plainer, *recipe.layers[i + 1 :]))
                )
    if case.channels_last:
        yield replace(case, channels_last=False)
    if case.division != "balanced":
        yield replace(case, division="balanced")
    if case.segments:
        yield replace(case, segments=0)
    if case.halo != "extend":
        yield replace(case, halo="extend")


def _with(case: Case, recipe: Recipe, dropped: int) -> Case:
    """The case with a layer less: layers after it, which the plan may name, have moved."""
    if isinstance(case.plan, str):
        return replace(case, recipe=recipe)
    moved = {}
    for name, phrase in case.plan.items():
        number = int(name.removeprefix("layers."))
        if number != dropped:
            moved[f"layers.{number - (number > dropped)}"] = phrase
    parts = prime_mesh(case.ranks).axes
    return replace(case, recipe=recipe, plan=moved or ",".join(f"{i}={n}" for i, (_, n) in zip("hwn", parts)))


def as_test(case: Case, problem: str) -> str:
    """A pytest file that fails as long as the case does."""
    layers = "".join(f"        {layer!r},\n" for layer in case.recipe.layers)
    return (
        f'"""Found by `halocline fuzz`: {problem}."""\n\n'
        "from halocline.fuzz.check import Case, check\n"
        "from halocline.fuzz.layers import Layer\n"
        "from halocline.fuzz.net import Recipe\n\n\n"
        "def test_split_net_equals_one_process() -> None:\n"
        f"    layers = (\n{layers}    )\n"
        f"    recipe = Recipe({case.recipe.shape}, layers, {case.recipe.head!r})\n"
        f"    case = Case(recipe, {case.ranks}, {case.plan!r}, {case.halo!r}, {case.channels_last}, {case.train}, "
        f"{case.seed}, {case.division!r}, {case.segments})\n"
        "    assert check(case) is None\n"
    )
