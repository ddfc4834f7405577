"""Least errors: damped Gauss-Newton on logarithms of predicted over measured, within ranges.

The loss is quadratic for errors well below ``LARGE`` and grows with their size above, so that a run
that nothing explains counts no more than its error. A fit without some of the runs starts at the
fit of all, and takes errors to change with its slopes: it need not predict anything to be found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.calibration.fit import Free
from autopar.solver.facts import Floats

Predict = Callable[[Floats], Floats]
"""From encoded numbers, logarithms of predicted over measured of all runs."""

LARGE = 0.05
"""An error from which on it counts by its size."""

CHANGE = 0.01
"""What slopes are differences over, in encoded numbers: large enough to average over the steps of
tiles and waves.
"""

_DAMPING = 1e-5
_HALVINGS = 4
_LINEAR_STEPS = 50


def encode(free: Sequence[Free], values: Sequence[float]) -> Floats:
    """Numbers as they are fitted: logarithms, where a range does not start at 0."""
    return np.array([one.encode(value) for one, value in zip(free, values, strict=True)])


def decode(free: Sequence[Free], x: Floats) -> dict[str, float]:
    """Numbers by their paths."""
    return {one.path: one.decode(value) for one, value in zip(free, x.tolist(), strict=True)}


def loss(residuals: Floats, weights: Floats) -> float:
    """What is minimized: the weighted sum of smooth absolute errors."""
    return float(weights @ (np.sqrt(1 + (residuals / LARGE) ** 2) - 1))


def change_of(free: Sequence[Free], x: Floats, index: int) -> float:
    """How to change a number for its slope: towards the inside at the end of a range."""
    return -CHANGE if x[index] + CHANGE > free[index].encode(free[index].high) else CHANGE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """A fit: encoded numbers, and the residuals of all runs."""

    x: Floats
    residuals: Floats


def step_on(
    predict: Predict, free: Sequence[Free], start: Found, slopes: Floats, weights: Floats
) -> Found | None:
    """One Gauss-Newton step, halved until it lowers the loss; None where it does not.

    Args:
        slopes: Derivatives of all residuals by all numbers, at ``start`` or near.
        weights: Of all runs; 0 for those that are left out.
    """
    moved = _move(free, start, slopes, weights)
    before = loss(start.residuals, weights)
    for _ in range(_HALVINGS):
        x = start.x + moved
        residuals = predict(x)
        if loss(residuals, weights) < before:
            return Found(x=x, residuals=residuals)
        moved = moved / 2
    return None


def fit_near(free: Sequence[Free], start: Found, slopes: Floats, weights: Floats) -> Floats:
    """The encoded numbers with the least loss, if residuals are linear from ``start`` on."""

    def linear(x: Floats) -> Floats:
        return start.residuals + slopes @ (x - start.x)

    found = start
    for _ in range(_LINEAR_STEPS):
        better = step_on(linear, free, found, slopes, weights)
        if better is None:
            break
        found = better
    return found.x


def _move(free: Sequence[Free], start: Found, slopes: Floats, weights: Floats) -> Floats:
    """The step of the quadratic model; numbers that would leave their range end at its end."""
    low = np.array([one.encode(one.low) for one in free]) - start.x
    high = np.array([one.encode(one.high) for one in free]) - start.x
    robust = weights / np.sqrt(1 + (start.residuals / LARGE) ** 2)
    normal = slopes.T @ (robust[:, None] * slopes)
    normal += _DAMPING * robust.sum() * np.eye(len(free))
    gradient = slopes.T @ (robust * start.residuals)
    moved, inside = np.zeros(len(free)), np.ones(len(free), dtype=bool)
    while inside.any():
        right = -gradient[inside] - normal[np.ix_(inside, ~inside)] @ moved[~inside]
        found = np.linalg.solve(normal[np.ix_(inside, inside)], right)
        bounded = np.clip(found, low[inside], high[inside])
        moved[inside] = bounded
        left = np.flatnonzero(inside)[bounded != found]
        if not len(left):
            break
        inside[left] = False
    return moved
