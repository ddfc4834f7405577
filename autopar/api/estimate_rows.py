"""``estimate_rows``: the estimates of a table of layouts, shape by shape, on several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from autopar.api.planning import capture_request
from autopar.api.request import Request, make_request
from autopar.estimation import EstimateRow, ModelShape, cluster_of, open_shape, pins_of
from autopar.estimation.predictions import Record, record_of
from autopar.ir.errors import AutoparError, InputError
from autopar.ir.plan import PrecisionName, TrainingPlan
from autopar.solver.estimate import Estimator
from autopar.solver.layout.model_facts import ModelFacts, model_facts

RowProgress = Callable[[int], None]
"""Is told how many rows are done."""


def estimate_rows(
    rows: Sequence[EstimateRow], *, jobs: int | None = None, progress: RowProgress | None = None
) -> list[Record]:
    """The estimates of ``rows``, in their order; what is wrong with a row is in its record.

    A row's estimate is that of ``autopar.estimate`` with its pins, whatever the other rows are.

    Args:
        jobs: Processes; default: as many as there are CPUs for this one. One works in here.
        progress: Called as rows are done.

    Raises:
        InputError: ``jobs`` is below 1.
        AutoparError: A process was killed.
    """
    if jobs is None:
        jobs = len(os.sched_getaffinity(0))
    if jobs < 1:
        raise InputError(f"jobs is {jobs}; it must be at least 1")
    groups = _groups(rows)
    found: dict[int, Record] = {}
    if progress is not None:
        progress(0)
    for records in _spread(groups, min(jobs, len(groups))):
        found |= records
        if progress is not None:
            progress(len(found))
    return [found[place] for place in range(len(rows))]


_Group = Mapping[int, EstimateRow]
"""Rows of one shape by their places."""


def _groups(rows: Sequence[EstimateRow]) -> list[_Group]:
    """The largest work first, so that no process ends long after the others."""
    by_shape: dict[ModelShape, dict[int, EstimateRow]] = {}
    for place, row in enumerate(rows):
        by_shape.setdefault(row.shape, {})[place] = row
    return sorted(by_shape.values(), key=len, reverse=True)


def _spread(groups: Sequence[_Group], jobs: int) -> Iterator[dict[int, Record]]:
    """The records of each group, in any order."""
    if jobs <= 1:
        yield from map(_estimate_group, groups)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker) as pool:
        futures = [pool.submit(_estimate_group, group) for group in groups]
        try:
            for done in as_completed(futures):
                yield done.result()
        except BrokenProcessPool:
            raise AutoparError(
                "a process that estimates rows was killed",
                hint="fewer --jobs, if the machine is short of memory",
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """An interrupt ends a worker silently: the process that started it reports. Each has a CPU."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)


def _estimate_group(rows: _Group) -> dict[int, Record]:
    shape = _Shape()
    return {place: shape.record(row) for place, row in rows.items()}


class _Shape:
    """What the rows of one shape share: the captured model, and estimators of clusters."""

    def __init__(self) -> None:
        self._facts: dict[PrecisionName, ModelFacts | AutoparError] = {}
        self._estimators: dict[tuple[str, TrainingPlan], Estimator] = {}

    def record(self, row: EstimateRow) -> Record:
        try:
            request = make_request(
                open_shape(row.shape),
                cluster_of(row),
                global_batch_size=row.global_batch,
                seq_len=row.shape.seq,
                pin=pins_of(row),
            )
            estimate = self._estimator(request)(
                request.pin, global_batch_size=request.global_batch_size
            )
        except AutoparError as error:
            return {"id": row.id, "error": error.what}
        return record_of(row.id, estimate)

    def _estimator(self, request: Request) -> Estimator:
        key = (request.cluster.fingerprint, request.training)
        if key not in self._estimators:
            facts = self._captured(request)
            self._estimators[key] = Estimator(facts, request.cluster, training=request.training)
        return self._estimators[key]

    def _captured(self, request: Request) -> ModelFacts:
        precision = request.training.precision
        if precision not in self._facts:
            try:
                self._facts[precision] = model_facts(capture_request(request))
            except AutoparError as error:
                self._facts[precision] = error
        found = self._facts[precision]
        if isinstance(found, AutoparError):
            raise found
        return found
