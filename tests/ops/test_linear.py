"""Linear layers, matrix products and tables under chosen splits."""

import pytest
import torch

from halocline.ops import rule_for
from halocline.ops.matmul import parse_einsum

from .fixed_split import check_split, node_for, reads

aten = torch.ops.aten


def image(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_features_split_the_weight_and_the_bias() -> None:
    node, _ = node_for(aten.linear.default, image(4, 7, 6), image(5, 6), image(5))
    x, weight, bias = reads(node, n=(0, 2), f=(1, 3))
    assert (x.intervals, weight.intervals, bias.intervals) == (((0, 2), (0, 7), (0, 6)), ((1, 3), (0, 6)), ((1, 3),))


@pytest.mark.parametrize("split", [{"n": 3}, {"f": 2}, {"n": 2, "f": 3}, {"n": 5}])
def test_parameter_gradients_are_summed_over_samples(split: dict[str, int]) -> None:
    check_split(aten.linear.default, image(4, 6), image(5, 6), image(5), split=split, whole=("weight", "bias"))


def test_table_whose_gradient_is_scaled_by_counts_stays_together() -> None:
    numbers = torch.tensor([[0, 1, 1], [1, 2, 0]])
    node, _ = node_for(aten.embedding.default, image(4, 3), numbers, -1, True)
    assert set(rule_for(node).signature(node).indices) == {"f"}
    check_split(aten.embedding.default, image(4, 3), numbers, 1, True, split={"f": 3}, whole=("weight",))
    check_split(aten.embedding.default, image(4, 3), numbers, 1, False, split={"c": 3}, whole=("weight",))


def test_sparse_gradients_are_given_dense() -> None:
    check_split(aten.embedding.default, image(4, 3), torch.tensor([1, 3, 1]), -1, False, False, split={"n": 3})


@pytest.mark.parametrize(
    "shapes", [((2, 3, 4, 5), (5, 6)), ((3, 1, 4, 5), (2, 5, 6)), ((5,), (2, 5, 6)), ((3, 4, 5), (5,))]
)
def test_matmul_of_every_rank(shapes: tuple[tuple[int, ...], ...]) -> None:
    node, _ = node_for(aten.matmul.default, image(*shapes[0]), image(*shapes[1]))
    for index in rule_for(node).signature(node).indices:
        check_split(aten.matmul.default, image(*shapes[0]), image(*shapes[1]), split={index: 2})


@pytest.mark.parametrize(
    ("equation", "ranks", "parsed"),
    [
        ("ij, jk", [2, 2], ([("i", "j"), ("j", "k")], ("i", "k"))),
        ("ba", [2], ([("b", "a")], ("a", "b"))),
        ("...i,...i", [3, 1], ([("...1", "...0", "i"), ("i",)], ("...1", "...0"))),
        ("a...->...a", [3], ([("a", "...1", "...0")], ("...1", "...0", "a"))),
    ],
)
def test_equations(equation: str, ranks: list[int], parsed: object) -> None:
    assert parse_einsum(equation, ranks) == parsed


def test_a_letter_on_the_diagonal_is_not_split() -> None:
    node, _ = node_for(aten.einsum.default, "aab->ab", [image(3, 3, 4)])
    assert dict(rule_for(node).signature(node).indices) == {"b": 4}
    check_split(aten.einsum.default, "aab->ab", [image(3, 3, 4)], split={"b": 2})
