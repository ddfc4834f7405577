"""The fit of all runs, and fits without one series after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.calibration.hardware import value_at
from autopar.solver import Cluster
from autopar.solver.facts import Floats
from benchmarks.fit.least_errors import Found, decode, encode, fit_near, loss, step_on
from benchmarks.fit.memory import fit_memory, memories
from benchmarks.fit.numbers import TIMES
from benchmarks.fit.runs import Run
from benchmarks.fit.workers import Workers, workers

Progress = Callable[[str], None]
NUM_STEPS = 6
"""Of the fit of all runs, each of which lowers the loss by ``SETTLED`` of it at least."""

SETTLED = 0.003

AIM = 0.1
AIMS: Mapping[str, float] = {
    "hagemann": 0.05,
    "megatron_a100": 0.08,
    "bigscience_a100": 0.08,
    "vtrain_a100": 0.12,
    "mosaic_a100": 0.1,
}
"""Mean errors of steps that are aimed at: lower where runs were measured with more care. They weigh
runs in the fit, and nothing else.
"""

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimeFit:
    """Errors are predicted over measured, minus 1, of each run.

    Attributes:
        values: Fitted numbers by their paths.
        before: Errors under the hardware files.
        fitted: Under the fit of all runs.
        left_out: Under the fit of the runs of all other series.
        ranges: Of each number, over the fits without a series.
    """

    values: Mapping[str, float]
    before: Floats
    fitted: Floats
    left_out: Floats
    ranges: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryFit:
    """As ``TimeFit``: which runs are said wrongly to run out of memory or not to, and errors of
    what tools show.
    """

    values: Mapping[str, float]
    wrong_before: Floats
    wrong_fitted: Floats
    wrong_left_out: Floats
    before: Floats
    fitted: Floats
    left_out: Floats


def weights_of(runs: Sequence[Run]) -> Floats:
    """Each series counts as the square root of its runs, so that no long sweep rules, over the
    square of the error that is aimed at.
    """
    series = [run.measured.series for run in runs]
    count = Counter(series)
    aims = [AIMS.get(run.measured.dataset, AIM) for run in runs]
    weights = np.array(
        [count[name] ** -0.5 / aim**2 for name, aim in zip(series, aims, strict=True)]
    )
    return weights / weights.sum()


def fit_times(runs: Sequence[Run], *, jobs: int, progress: Progress) -> TimeFit:
    """Fit the numbers of ``TIMES`` to the steps of ``runs``, all of which are timed."""
    free = [number.free for number in TIMES]
    hardware = Cluster(runs[0].cluster.name).hardware
    x = encode(free, [value_at(hardware, one.path) for one in free])
    weights = weights_of(runs)
    with workers(runs, free, jobs=jobs) as pool:
        start = Found(x=x, residuals=pool.residuals(x))
        before = np.expm1(start.residuals)
        planned = np.array([run.step_s / (run.measured.step_s or np.nan) - 1 for run in runs])
        assert np.allclose(before, planned, rtol=0, atol=1e-9), "predicts otherwise than plans"
        found, slopes = _fit(pool, start, weights, progress)
        series = sorted({run.measured.series for run in runs})
        masks = [np.array([run.measured.series == name for run in runs]) for name in series]
        progress(f"without each of {len(series)} series")
        others = [fit_near(free, found, slopes, np.where(mask, 0.0, weights)) for mask in masks]
        places = [np.flatnonzero(mask).tolist() for mask in masks]
        left_out = np.zeros(len(runs))
        for mask, residuals in zip(masks, pool.residuals_of(others, places), strict=True):
            left_out[mask] = np.expm1(residuals)
    values = [decode(free, x) for x in others]
    return TimeFit(
        values=decode(free, found.x),
        before=before,
        fitted=np.expm1(found.residuals),
        left_out=left_out,
        ranges={
            one.path: (min(of[one.path] for of in values), max(of[one.path] for of in values))
            for one in free
        },
    )


def _fit(pool: Workers, start: Found, weights: Floats, progress: Progress) -> tuple[Found, Floats]:
    """The fit, and its slopes."""
    free = [number.free for number in TIMES]
    slopes, number = pool.slopes(start.x), 0
    while number < NUM_STEPS:
        number += 1
        progress(f"step {number}: loss {loss(start.residuals, weights):.5f}")
        found = step_on(pool.residuals, free, start, slopes, weights)
        if found is None:
            break
        settled = 1 - loss(found.residuals, weights) / loss(start.residuals, weights) < SETTLED
        start, slopes = found, pool.slopes(found.x)
        if settled:
            break
    return start, slopes


def fit_memories(runs: Sequence[Run], hardware: Cluster) -> MemoryFit:
    """Fit the numbers of ``MEMORY``: one at a time without each series that says something."""
    judged = [run for run in runs if run.measured.out_of_memory is not None]
    shown = [run for run in runs if run.measured.used_gib is not None]
    ran_out = np.array([bool(run.measured.out_of_memory) for run in judged])
    used = np.array([float(run.measured.used_gib or 0) * _GIB for run in shown])
    outcomes, sizes = memories(judged), memories(shown)
    paths = ("context_bytes", "fragmentation", "overlap_fragmentation", "reserve")
    file = {f"memory.{name}": value_at(hardware.hardware, f"memory.{name}") for name in paths}

    def wrong(values: Mapping[str, float]) -> Floats:
        return ((outcomes.peaks(values) > outcomes.usable) != ran_out).astype(float)

    def errors(values: Mapping[str, float]) -> Floats:
        return sizes.shown(values) / used - 1

    values = fit_memory(outcomes, ran_out, sizes, used)
    wrong_left_out, left_out = wrong(values), errors(values)
    telling = {run.measured.series for run, out in zip(judged, ran_out, strict=True) if out}
    for name in sorted(telling | {run.measured.series for run in shown}):
        one = np.array([run.measured.series == name for run in judged])
        other = np.array([run.measured.series == name for run in shown])
        found = fit_memory(
            memories([run for run, out in zip(judged, one, strict=True) if not out]),
            ran_out[~one],
            memories([run for run, out in zip(shown, other, strict=True) if not out]),
            used[~other],
        )
        wrong_left_out[one], left_out[other] = wrong(found)[one], errors(found)[other]
    return MemoryFit(
        values=values,
        wrong_before=wrong(file),
        wrong_fitted=wrong(values),
        wrong_left_out=wrong_left_out,
        before=errors(file),
        fitted=errors(values),
        left_out=left_out,
    )
