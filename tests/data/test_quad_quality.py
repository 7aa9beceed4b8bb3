"""The quality metrics against values worked out by hand, and their invariances."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halocline.data.quad_quality import LIMIT, METRICS, arc_cosine, quads


def measure(*corners):
    q = quads([np.array([x], float) for x, _ in corners], [np.array([y], float) for _, y in corners])
    return {name: float(metric(q)[0]) for name, metric in METRICS.items()}


SQUARE = dict.fromkeys(METRICS, 1.0) | {
    "skew": 0.0,
    "taper": 0.0,
    "oddy": 0.0,
    "minimum angle": 90.0,
    "maximum angle": 90.0,
}
ROOT2, ROOT5 = math.sqrt(2), math.sqrt(5)


@pytest.mark.parametrize(
    "corners, expected",
    [
        pytest.param([(0, 0), (1, 0), (1, 1), (0, 1)], SQUARE, id="unit square"),
        pytest.param(
            [(0, 0), (3, 0), (3, 1), (0, 1)],
            {
                "area": 3,
                "aspect ratio": 3 * 8 / 12,
                "maximum edge ratio": 3,
                "skew": 0,
                "taper": 0,
                "stretch": ROOT2 / math.sqrt(10),
                "minimum angle": 90,
                "maximum angle": 90,
                "oddy": (9 - 1) ** 2 / (2 * 9),
                "condition number": (9 + 1) / (2 * 3),
                "minimum Jacobian": 3,
                "scaled Jacobian": 1,
                "shear": 1,
                "shape": 2 * 3 / 10,
            },
            id="rectangle",
        ),
        pytest.param(
            [(0, 0), (1, 0), (2, 1), (1, 1)],  # sheared by 45 degrees
            {
                "area": 1,
                "aspect ratio": ROOT2 * (2 + 2 * ROOT2) / 4,
                "maximum edge ratio": ROOT2,
                "skew": 1 / ROOT2,
                "taper": 0,
                "stretch": ROOT2 / ROOT5,
                "minimum angle": 45,
                "maximum angle": 135,
                "oddy": (1 + 4) / 2,
                "condition number": 3 / 2,
                "minimum Jacobian": 1,
                "scaled Jacobian": 1 / ROOT2,
                "shear": 1 / ROOT2,
                "shape": 2 / 3,
            },
            id="parallelogram",
        ),
        pytest.param(
            [(0, 0), (4, 0), (3, 1), (1, 1)],  # a trapezoid: axes (6, 0) and (0, 2), cross derivative (-2, 0)
            {
                "area": 3,
                "aspect ratio": 4 * (6 + 2 * ROOT2) / 12,
                "maximum edge ratio": 3,
                "skew": 0,
                "taper": 1,
                "stretch": ROOT2 * ROOT2 / math.sqrt(10),
                "minimum angle": 45,
                "maximum angle": 135,
                "oddy": max(((16 - 2) ** 2 + 4 * 16) / (2 * 16), ((4 - 2) ** 2 + 4 * 4) / (2 * 4)),
                "condition number": max(18 / (2 * 4), 6 / (2 * 2)),
                "minimum Jacobian": 2,
                "scaled Jacobian": 1 / ROOT2,
                "shear": 1 / ROOT2,
                "shape": min(2 * 4 / 18, 2 * 2 / 6),
            },
            id="trapezoid",
        ),
        pytest.param(
            [(0, 0), (4, 0), (1, 1), (0, 4)],  # corner 2 pushed in past the diagonal: an arrowhead
            {
                "area": 4,
                "minimum Jacobian": -8,
                "scaled Jacobian": -8 / 10,
                "shear": 0,
                "shape": 0,
                "condition number": LIMIT,
                "maximum angle": 360 - math.degrees(math.acos(-6 / 10)),
                "minimum angle": math.degrees(math.acos(3 / math.sqrt(10))),
                "skew": abs((5 * -3) + (-3 * 5)) / 34,
            },
            id="folded",
        ),
        pytest.param(
            [(0, 0), (1, 0), (1, 0), (0, 0)],  # no height
            {
                "area": 0,
                "aspect ratio": LIMIT,
                "maximum edge ratio": LIMIT,
                "stretch": 0,
                "minimum Jacobian": 0,
                "scaled Jacobian": 0,
                "shear": 0,
                "shape": 0,
                "condition number": LIMIT,
                "oddy": LIMIT,
            },
            id="degenerate",
        ),
    ],
)
def test_hand_computed(corners, expected):
    found = measure(*corners)
    assert set(expected) <= set(found)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-7, abs=3e-6), name


def test_a_point_and_extreme_sizes_give_finite_numbers():
    with np.errstate(all="raise", under="ignore"):
        for corners in (
            [(0, 0)] * 4,
            [(0, 0), (1e-8, 0), (1e-8, 1e-8), (0, 1e-8)],
            [(0, 0), (1e9, 1), (-1e9, 2), (3, 4)],
        ):
            assert all(math.isfinite(v) for v in measure(*corners).values())


coordinate = st.floats(-2, 2).map(lambda v: round(v, 3))
corner = st.tuples(coordinate, coordinate)


@given(st.tuples(corner, corner, corner, corner), st.integers(0, 3), st.integers(0, 3))
def test_numbering_and_quarter_turns_do_not_matter(corners, first, turns):
    moved = list(corners[first:] + corners[:first])
    for _ in range(turns):
        moved = [(-y, x) for x, y in moved]
    before, after = measure(*corners), measure(*moved)
    for name in METRICS:
        assert after[name] == pytest.approx(before[name], rel=1e-6, abs=1e-4), name


def test_arc_cosine():
    c = np.linspace(-1, 1, 20001)
    assert np.abs(arc_cosine(c) - np.arccos(c)).max() < 2.5e-8
