"""Random nets agree with one process, and a net that would not is found, made small and written down as a test."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from halocline.cli.fuzz import command
from halocline.fuzz.check import Case, Unusable, check, draw_case
from halocline.fuzz.layers import KINDS, Layer
from halocline.fuzz.net import Recipe
from halocline.fuzz.shrink import as_test, shrunk
from halocline.ops.pool import MaxPooling
from halocline.ops.rule import Call


@pytest.mark.parametrize("number", range(60))
def test_random_net_equals_one_process(number: int) -> None:
    try:
        assert check(draw_case(11, number)) is None
    except Unusable as reason:
        pytest.skip(str(reason))


# What has been found, made small. The channels-last net could not be run in that format by torch itself.
FOUND = [
    Case(Recipe((1, 1, 1, 2), (Layer("norm", {"how": "batch", "groups": 1, "affine": True, "track": False,
                                              "momentum": None}),)), 2, "w=2", "extend", False, True, 3),
    Case(Recipe((1, 2, 4, 1, 1), (Layer("shuffle", {"down": False, "factor": 2}),)), 2, "h=2", "extend", True),
]  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_what_was_found_holds(case: Case) -> None:
    assert check(case) is None


def test_the_same_seed_draws_the_same_nets_with_every_kind_of_layer() -> None:
    cases = [draw_case(5, number) for number in range(120)]
    assert cases == [draw_case(5, number) for number in range(120)]
    assert {layer.kind for case in cases for layer in case.recipe.layers} >= set(KINDS) | {"save", "add", "cat"}


def test_a_wrong_rule_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = (
        Layer("act", {"name": "ReLU", "inplace": False}),
        Layer("save"),
        Layer("pool", {"how": "Max", "kernel_size": (3, 3), "stride": (2, 1), "padding": (1, 0), "ceil_mode": True}),
        Layer("act", {"name": "Tanh", "inplace": False}),
    )
    case = Case(Recipe((3, 5, 17, 13), layers, "pooled"), 6, "n=3,h=2", "correct", True)
    assert check(case) is None
    spoil_max_pool(monkeypatch)
    problem = check(case)
    assert problem is not None
    small, found = shrunk(case, problem)
    assert [layer.kind for layer in small.recipe.layers] == ["pool"]
    assert small.ranks == 2 and small.recipe.shape[0] <= 2 and max(small.recipe.shape[2:]) <= 6
    assert (small.recipe.head, small.channels_last, small.halo) == ("none", False, "extend")
    text = as_test(small, found)
    namespace: dict[str, object] = {}
    exec(compile(text, "found.py", "exec"), namespace)
    with pytest.raises(AssertionError):
        namespace["test_split_net_equals_one_process"]()  # type: ignore[operator]


def spoil_max_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that do not begin at the top get a wrong first row, as with a halo that is one row short."""
    right = MaxPooling.run

    def wrong(self: MaxPooling, call: Call, *inputs: Tensor) -> Tensor:
        output = right(self, call, *inputs)
        below = call.writes.intervals[2][0] > 0
        return torch.cat([output[:, :, :1] + 1, output[:, :, 1:]], 2) if below else output

    monkeypatch.setattr(MaxPooling, "run", wrong)


def test_command() -> None:
    ended = CliRunner().invoke(command, ["--seed", "3", "--minutes", "0.05", "--ranks", "3", "--json"], obj=[])
    document = json.loads(ended.stdout)
    assert document["failures"] == [] and document["tried"] >= 1 and document["seed"] == 3


def test_shrinking_keeps_plans_by_layer_on_their_layers() -> None:
    layers = tuple(Layer("act", {"name": name, "inplace": False}) for name in ("Tanh", "ReLU", "SiLU"))
    case = Case(Recipe((1, 2, 6, 6), layers), 2, {"layers.0": "h=2", "layers.2": "w=2"})

    def pretended(candidate: Case) -> str | None:
        names = [layer.given["name"] for layer in candidate.recipe.layers]
        plan = candidate.plan
        if isinstance(plan, str) or "SiLU" not in names:
            return None
        return "wrong" if plan.get(f"layers.{names.index('SiLU')}") == "w=2" else None

    small, _ = shrunk(case, "wrong", pretended)
    assert small == replace(small, plan={"layers.0": "w=2"})
    assert [layer.given["name"] for layer in small.recipe.layers] == ["SiLU"]
