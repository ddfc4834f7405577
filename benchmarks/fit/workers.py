"""Processes that share the work: laying out models, slopes by number, series that are left out."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from autopar.calibration.fit import Free
from autopar.solver.facts import Floats
from benchmarks.fit.evaluate import Evaluator
from benchmarks.fit.least_errors import change_of, decode
from benchmarks.fit.measured import Measured
from benchmarks.fit.runs import Run, by_shape, lay_out


class Fitter:
    """Residuals, slopes and fits of timed ``runs``, in this process."""

    def __init__(self, runs: Sequence[Run], free: Sequence[Free]) -> None:
        self.free = list(free)
        self.evaluator = Evaluator(runs)
        times = [run.measured.step_s for run in runs]
        self.measured = np.array([step_s for step_s in times if step_s is not None])
        assert len(self.measured) == len(runs)
        self._at: tuple[Floats, Floats] | None = None

    def residuals(self, x: Floats) -> Floats:
        """Logarithms of predicted over measured."""
        return np.log(self.evaluator.step_seconds(decode(self.free, x)) / self.measured)

    def slopes(self, x: Floats, index: int) -> Floats:
        """Derivatives of all residuals by a number."""
        if self._at is None or not np.array_equal(self._at[0], x):
            steps = self.evaluator.remember(decode(self.free, x))
            self._at = (x, np.log(steps / self.measured))
        change = change_of(self.free, x, index)
        moved = x.copy()
        moved[index] += change
        return (self.residuals(moved) - self._at[1]) / change

    def residuals_of(self, x: Floats, places: Sequence[int]) -> Floats:
        """``residuals`` of the runs at some places."""
        steps = self.evaluator.step_seconds(decode(self.free, x), places)
        return np.log(steps / self.measured[list(places)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workers:
    """A pool whose processes each have a ``Fitter`` of the same runs."""

    pool: ProcessPoolExecutor
    num_free: int

    def residuals(self, x: Floats) -> Floats:
        return self.pool.submit(_residuals, x).result()

    def slopes(self, x: Floats) -> Floats:
        """Derivatives of all residuals by all numbers."""
        found = self.pool.map(_slopes, [x] * self.num_free, range(self.num_free))
        return np.stack(list(found), axis=1)

    def residuals_of(
        self, xs: Sequence[Floats], places: Sequence[Sequence[int]]
    ) -> Iterator[Floats]:
        """For each of some encoded numbers, residuals of the runs at some places."""
        return self.pool.map(_residuals_of, xs, places)


def lay_out_all(
    measured: Sequence[Measured], *, jobs: int, progress: Callable[[int], None]
) -> list[Run]:
    """All runs, in the order of their models; ``progress`` is told how many are done."""
    found: list[Run] = []
    with _pool(jobs, _quiet) as pool:
        for runs in pool.map(lay_out, by_shape(measured)):
            found += runs
            progress(len(found))
    return found


@contextmanager
def workers(runs: Sequence[Run], free: Sequence[Free], *, jobs: int) -> Iterator[Workers]:
    """Processes to fit ``free`` numbers to timed ``runs``."""
    with _pool(jobs, _start, runs, free) as pool:
        yield Workers(pool=pool, num_free=len(free))


@contextmanager
def _pool(
    jobs: int, initializer: Callable[..., None], *arguments: object
) -> Iterator[ProcessPoolExecutor]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when a process imports torch
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        jobs, mp_context=context, initializer=initializer, initargs=arguments
    ) as pool:
        yield pool


_fitters: list[Fitter] = []
"""Of a worker process: one."""


def _quiet() -> None:
    import torch

    torch.set_num_threads(1)


def _start(runs: Sequence[Run], free: Sequence[Free]) -> None:
    _quiet()
    _fitters.append(Fitter(runs, free))


def _residuals(x: Floats) -> Floats:
    return _fitters[0].residuals(x)


def _slopes(x: Floats, index: int) -> Floats:
    return _fitters[0].slopes(x, index)


def _residuals_of(x: Floats, places: Sequence[int]) -> Floats:
    return _fitters[0].residuals_of(x, places)
