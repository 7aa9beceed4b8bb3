"""A random flow that carries a mesh: eddies, pressure pulses and shear layers, in closed form.

The velocity is a function of place and time alone, so a node's path depends on where the node started and on nothing
else: any part of a mesh can be advanced without the rest. All operations on nodes are correctly rounded ones
(+ - * /, comparisons), which makes the paths equal bit for bit however the mesh is cut. Lengths are in cells of the
undeformed mesh; time runs from 0 to 1.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

EDDIES, PULSES, SHEARS = 12, 4, 2


@dataclass(frozen=True)
class Swirl:
    """Rotation or dilation about a moving centre, within `radius`: velocity = rate(t) (1 - r^2/radius^2)^2 r.

    An eddy turns the vector r by 90 degrees, a pulse does not. `rate(t) = mean + swing sin(pulsation t + phase)`.
    """

    x: float
    y: float
    drift_x: float
    drift_y: float
    radius: float
    mean: float
    swing: float
    pulsation: float
    phase: float

    def rate(self, t: float) -> float:
        return self.mean + self.swing * math.sin(self.pulsation * t + self.phase)


@dataclass(frozen=True)
class Shear:
    """A layer across which the velocity along `(along_x, along_y)` passes from -speed/2 to speed/2, then falls off."""

    along_x: float
    along_y: float
    offset: float
    thickness: float
    speed: float


@dataclass(frozen=True)
class Flow:
    """The superposition of all its parts."""

    eddies: tuple[Swirl, ...]
    pulses: tuple[Swirl, ...]
    shears: tuple[Shear, ...]


def draw_flow(rng: np.random.Generator, size: int) -> Flow:
    """A random flow over `size` x `size` cells, strong enough to tangle some tenths of them by time 1.

    An eddy that turns its centre by w has sheared the mesh by up to w, and folds cells of width 1 at distance r once
    w^2 is about 2 r: a finer mesh follows a flow longer. So each eddy's turn is drawn as a multiple of sqrt(2 radius).
    """

    def swirl(radius: float, mean: float, swing: float, pulsation: float) -> Swirl:
        x, y = rng.uniform(0.0, size, 2)
        drift_x, drift_y = rng.uniform(-0.1 * size, 0.1 * size, 2)
        return Swirl(x, y, drift_x, drift_y, radius, mean, swing, pulsation, rng.uniform(0.0, 2.0 * math.pi))

    eddies = []
    for _ in range(EDDIES):
        radius = size * rng.uniform(0.08, 0.22)
        turn = rng.choice((-1.0, 1.0)) * rng.uniform(0.6, 1.4) * math.sqrt(2.0 * radius)
        eddies.append(swirl(radius, turn, 0.4 * turn, 2.0 * math.pi * rng.uniform(0.5, 1.5)))
    pulses = []
    for _ in range(PULSES):
        pulsation = 2.0 * math.pi * rng.uniform(1.0, 2.0)
        pulses.append(swirl(size * rng.uniform(0.15, 0.3), 0.0, rng.uniform(0.2, 0.4) * pulsation, pulsation))
    shears = []
    for _ in range(SHEARS):
        angle = rng.uniform(0.0, 2.0 * math.pi)
        along = (math.cos(angle), math.sin(angle))
        x, y = rng.uniform(0.2 * size, 0.8 * size, 2)
        offset = along[0] * y - along[1] * x
        shears.append(Shear(*along, offset, size * rng.uniform(0.05, 0.15), size * rng.uniform(0.1, 0.3)))
    return Flow(tuple(eddies), tuple(pulses), tuple(shears))


def velocity(flow: Flow, t: float, x: Array, y: Array) -> tuple[Array, Array]:
    """Velocity at time `t` of the nodes at `x`, `y`, in cells per unit of time."""
    u, v = np.zeros_like(x), np.zeros_like(y)
    box = (float(x.min()), float(x.max()), float(y.min()), float(y.max()))
    for eddy in flow.eddies:
        if _touches(eddy, t, box):
            rx, ry = _swirl(eddy, t, x, y)
            u -= ry
            v += rx
    for pulse in flow.pulses:
        if _touches(pulse, t, box):
            rx, ry = _swirl(pulse, t, x, y)
            u += rx
            v += ry
    for shear in flow.shears:
        s = shear.along_x * y
        s -= shear.along_y * x
        s -= shear.offset
        s /= shear.thickness
        below = s * s
        below += 1.0
        s /= below
        u += s * (shear.speed * shear.along_x)
        v += s * (shear.speed * shear.along_y)
    return u, v


def advance(flow: Flow, t: float, dt: float, x: Array, y: Array) -> tuple[Array, Array]:
    """The nodes `x`, `y` of time `t` at time `t + dt`: one step of the classical Runge-Kutta method."""
    u1, v1 = velocity(flow, t, x, y)
    u2, v2 = velocity(flow, t + 0.5 * dt, x + 0.5 * dt * u1, y + 0.5 * dt * v1)
    u3, v3 = velocity(flow, t + 0.5 * dt, x + 0.5 * dt * u2, y + 0.5 * dt * v2)
    u4, v4 = velocity(flow, t + dt, x + dt * u3, y + dt * v3)
    return (
        x + (dt / 6.0) * ((u1 + u4) + 2.0 * (u2 + u3)),
        y + (dt / 6.0) * ((v1 + v4) + 2.0 * (v2 + v3)),
    )


def _touches(swirl: Swirl, t: float, box: tuple[float, float, float, float]) -> bool:
    # A swirl that misses the nodes' bounding box would add exact zeros: leaving it out changes no bit.
    x, y = swirl.x + swirl.drift_x * t, swirl.y + swirl.drift_y * t
    near_x, near_y = min(max(x, box[0]), box[1]), min(max(y, box[2]), box[3])
    return math.hypot(near_x - x, near_y - y) <= swirl.radius * (1.0 + 1e-9)


def _swirl(swirl: Swirl, t: float, x: Array, y: Array) -> tuple[Array, Array]:
    rx = x - (swirl.x + swirl.drift_x * t)
    ry = y - (swirl.y + swirl.drift_y * t)
    weight = rx * rx
    weight += ry * ry
    radius2 = swirl.radius * swirl.radius
    np.subtract(radius2, weight, out=weight)
    np.maximum(weight, 0.0, out=weight)
    weight *= weight
    weight *= swirl.rate(t) / (radius2 * radius2)
    rx *= weight
    ry *= weight
    return rx, ry
