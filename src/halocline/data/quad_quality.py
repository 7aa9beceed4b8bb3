"""Quality of planar quadrilaterals: 14 metrics as functions of the four corner points.

Definitions: Knupp, *Algebraic mesh quality metrics*, SIAM J. Sci. Comput. 23 (2001), and the reference manual of the
Verdict library, Stimpson et al., SAND2007-1751 (2007). Corners 0 to 3 run counter-clockwise, edge k goes from corner k
to corner k+1, and the Jacobian of corner k is the cross product of its two edges: negative where the quadrilateral is
folded.

Only operations that IEEE 754 rounds correctly are used (+ - * / sqrt, comparisons). So the value of a cell does not
depend on where in an array it stands, on the vector width, or on the machine. What grows without bound on a
degenerate quadrilateral stops at `LIMIT`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LIMIT = 1e12
_TINY = 1e-290
_CORNERS = range(4)
_DEGREES = 180.0 / math.pi


@dataclass(frozen=True)
class Quads:
    """What the metrics of an array of quadrilaterals share; every list has one array per corner or edge."""

    edge: list[tuple[Array, Array]]
    length2: list[Array]
    length: list[Array]
    jacobian: list[Array]
    dot: list[Array]
    axis: tuple[tuple[Array, Array], tuple[Array, Array]]
    cross_derivative: tuple[Array, Array]


def quads(x: list[Array], y: list[Array]) -> Quads:
    """Edges, corner Jacobians and principal axes of the quadrilaterals with corners `(x[k], y[k])`, k = 0 to 3."""
    edge = [(x[(k + 1) % 4] - x[k], y[(k + 1) % 4] - y[k]) for k in _CORNERS]
    length2 = [ex * ex + ey * ey for ex, ey in edge]
    # At corner k edge k leaves and edge k-1 arrives; the second vector of the corner is that edge, reversed.
    jacobian = [edge[k - 1][0] * edge[k][1] - edge[k - 1][1] * edge[k][0] for k in _CORNERS]
    dot = [-(edge[k - 1][0] * edge[k][0] + edge[k - 1][1] * edge[k][1]) for k in _CORNERS]
    first = (edge[0][0] - edge[2][0], edge[0][1] - edge[2][1])
    second = (edge[1][0] - edge[3][0], edge[1][1] - edge[3][1])
    cross_derivative = (-edge[0][0] - edge[2][0], -edge[0][1] - edge[2][1])
    return Quads(edge, length2, [np.sqrt(v) for v in length2], jacobian, dot, (first, second), cross_derivative)


def area(q: Quads) -> Array:
    """Signed area; 1 for the unit square."""
    return 0.25 * ((q.jacobian[0] + q.jacobian[2]) + (q.jacobian[1] + q.jacobian[3]))


def aspect_ratio(q: Quads) -> Array:
    """Longest edge times perimeter over four areas; 1 for a square."""
    perimeter = (q.length[0] + q.length[2]) + (q.length[1] + q.length[3])
    return _ratio(_largest(q.length) * perimeter, 4.0 * np.abs(area(q)))


def maximum_edge_ratio(q: Quads) -> Array:
    """The longer principal axis over the shorter one (Robinson 1987); 1 for a square."""
    first, second = (_norm(axis) for axis in q.axis)
    return _ratio(np.maximum(first, second), np.minimum(first, second))


def skew(q: Quads) -> Array:
    """|cos| of the angle between the principal axes (Robinson 1987); 0 for a rectangle."""
    (ax, ay), (bx, by) = q.axis
    return np.minimum(_ratio(np.abs(ax * bx + ay * by), _norm(q.axis[0]) * _norm(q.axis[1])), 1.0)


def taper(q: Quads) -> Array:
    """Length of the cross derivative over the shorter principal axis (Robinson 1987); 0 for a parallelogram."""
    return _ratio(_norm(q.cross_derivative), np.minimum(_norm(q.axis[0]), _norm(q.axis[1])))


def stretch(q: Quads) -> Array:
    """sqrt(2) times the shortest edge over the longer diagonal; 1 for a square."""
    diagonals = [_norm((q.edge[k][0] + q.edge[k + 1][0], q.edge[k][1] + q.edge[k + 1][1])) for k in (0, 1)]
    return _ratio(math.sqrt(2.0) * _smallest(q.length), _largest(diagonals))


def minimum_angle(q: Quads) -> Array:
    """The smallest angle between the two edges of a corner, in degrees, 0 to 180; 90 for a rectangle."""
    return _DEGREES * arc_cosine(_largest(_cosines(q)))


def maximum_angle(q: Quads) -> Array:
    """The largest angle of a corner, in degrees, taken as the outer one (360 - angle) if a corner is folded."""
    largest = _DEGREES * arc_cosine(_smallest(_cosines(q)))
    return np.where(minimum_jacobian(q) < 0.0, 360.0 - largest, largest)


def oddy(q: Quads) -> Array:
    """Largest distortion of the corners' metric tensors (Oddy et al. 1988); 0 for a square."""
    worst = []
    for k in _CORNERS:
        difference = q.length2[k] - q.length2[k - 1]
        worst.append(_ratio(difference * difference + 4.0 * (q.dot[k] * q.dot[k]), 2.0 * (q.jacobian[k] ** 2)))
    return _largest(worst)


def condition_number(q: Quads) -> Array:
    """Largest condition number (Frobenius, over 2) of the corners' Jacobian matrices; 1 for a square, else more."""
    return _largest([_ratio(q.length2[k] + q.length2[k - 1], 2.0 * q.jacobian[k]) for k in _CORNERS])


def minimum_jacobian(q: Quads) -> Array:
    """The smallest corner Jacobian; negative where the quadrilateral has tangled."""
    return _smallest(q.jacobian)


def scaled_jacobian(q: Quads) -> Array:
    """The smallest corner Jacobian over the lengths of its edges, -1 to 1; 1 for a rectangle."""
    sines = []
    for k in _CORNERS:
        size = q.length[k] * q.length[k - 1]
        sines.append(np.clip(q.jacobian[k] / np.maximum(size, _TINY), -1.0, 1.0))
    return _smallest(sines)


def shear(q: Quads) -> Array:
    """The scaled Jacobian where positive, else 0 (Knupp); 1 for a rectangle."""
    return np.maximum(scaled_jacobian(q), 0.0)


def shape(q: Quads) -> Array:
    """2 over the condition number of the worst corner, 0 if folded (Knupp); 1 for a square."""
    corners = [2.0 * q.jacobian[k] / np.maximum(q.length2[k] + q.length2[k - 1], _TINY) for k in _CORNERS]
    return np.maximum(_smallest(corners), 0.0)


METRICS: dict[str, Callable[[Quads], Array]] = {
    "area": area,
    "aspect ratio": aspect_ratio,
    "maximum edge ratio": maximum_edge_ratio,
    "skew": skew,
    "taper": taper,
    "stretch": stretch,
    "minimum angle": minimum_angle,
    "maximum angle": maximum_angle,
    "oddy": oddy,
    "condition number": condition_number,
    "minimum Jacobian": minimum_jacobian,
    "scaled Jacobian": scaled_jacobian,
    "shear": shear,
    "shape": shape,
}


def arc_cosine(c: Array) -> Array:
    """acos of `c`, -1 to 1, in radians, to 2e-8: Abramowitz and Stegun (1964), 4.4.46.

    The libraries' acos is not correctly rounded and may differ between vector and scalar loops.
    """
    a = np.abs(c)
    polynomial = np.full_like(a, -0.0012624911)
    for coefficient in (0.0066700901, -0.0170881256, 0.0308918810, -0.0501743046, 0.0889789874, -0.2145988016):
        polynomial = polynomial * a + coefficient
    positive = np.sqrt(np.maximum(1.0 - a, 0.0)) * (polynomial * a + 1.5707963050)
    return np.where(c < 0.0, math.pi - positive, positive)


def _cosines(q: Quads) -> list[Array]:
    return [np.clip(q.dot[k] / np.maximum(q.length[k] * q.length[k - 1], _TINY), -1.0, 1.0) for k in _CORNERS]


def _ratio(numerator: Array, denominator: Array) -> Array:
    """`numerator / denominator` for a numerator >= 0: at most `LIMIT`, which also stands for a denominator <= 0."""
    return numerator / np.maximum(denominator, numerator / LIMIT + _TINY)


def _norm(v: tuple[Array, Array]) -> Array:
    return np.sqrt(v[0] * v[0] + v[1] * v[1])


def _smallest(values: list[Array]) -> Array:
    return reduce(np.minimum, values)


def _largest(values: list[Array]) -> Array:
    return reduce(np.maximum, values)
