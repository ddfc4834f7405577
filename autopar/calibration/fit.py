"""Least squares: the hardware under which the cost model says what was measured.

Residuals are logarithms of predicted over measured seconds, and the cost model itself predicts:
whatever its formulas are, the fit inverts them. Levenberg's damped Gauss-Newton steps with numeric
derivatives; parameters that scale something are fitted by their logarithm. A parameter that no
sample depends on stays what it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.calibration.hardware import on, value_at, with_values
from autopar.calibration.samples import Sample, log_error
from autopar.solver.hardware import Cluster, Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """A number of the hardware that is fitted, and the range that it may take.

    With ``low`` 0 it is fitted as it is (in units of ``scale``), otherwise by its logarithm.
    """

    path: str
    low: float
    high: float
    scale: float = 1.0

    def encode(self, value: float) -> float:
        bounded = min(max(value, self.low), self.high)
        return math.log(bounded) if self.low > 0 else bounded / self.scale

    def decode(self, x: float) -> float:
        value = math.exp(min(x, 700.0)) if self.low > 0 else x * self.scale
        return min(max(value, self.low), self.high)


def fit(
    cluster: Cluster, samples: Sequence[Sample], free: Sequence[Free], *, num_steps: int = 60
) -> Hardware:
    """The hardware of ``cluster`` with the ``free`` numbers that fit ``samples`` best."""
    if not samples or not free:
        return cluster.hardware
    start = cluster.hardware
    x = np.array([one.encode(value_at(start, one.path)) for one in free])
    residuals = _residuals(cluster, samples, free, x)
    damping = 1e-2
    for _ in range(num_steps):
        slopes = _slopes(cluster, samples, free, x, residuals)
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.eye(len(free)), -slopes.T @ residuals)
        step = np.clip(step, -1.0, 1.0)
        tried = np.array([f.encode(f.decode(v)) for f, v in zip(free, x + step, strict=True)])
        found = _residuals(cluster, samples, free, tried)
        if found @ found < residuals @ residuals:
            settled = np.abs(tried - x).max() < 1e-6
            x, residuals, damping = tried, found, max(damping / 5, 1e-9)
            if settled:
                break
        else:
            damping *= 4
            if damping > 1e6:
                break
    return _hardware(start, free, x)


def _hardware(start: Hardware, free: Sequence[Free], x: np.ndarray) -> Hardware:
    return with_values(start, {f.path: f.decode(v) for f, v in zip(free, x.tolist(), strict=True)})


def _residuals(
    cluster: Cluster, samples: Sequence[Sample], free: Sequence[Free], x: np.ndarray
) -> np.ndarray:
    tried = on(cluster, _hardware(cluster.hardware, free, x))
    return np.array([log_error(sample, tried) for sample in samples])


def _slopes(
    cluster: Cluster,
    samples: Sequence[Sample],
    free: Sequence[Free],
    x: np.ndarray,
    residuals: np.ndarray,
) -> np.ndarray:
    """Derivatives of the residuals; towards the inside at the end of a range."""
    columns = []
    for index, one in enumerate(free):
        moved = x.copy()
        moved[index] += 1e-3
        if one.encode(one.decode(moved[index])) == x[index]:  # at the end of its range
            moved[index] = x[index] - 1e-3
        change = moved[index] - x[index]
        columns.append((_residuals(cluster, samples, free, moved) - residuals) / change)
    return np.stack(columns, axis=1)
