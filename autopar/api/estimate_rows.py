"""``estimate_rows``: the estimates of a table of layouts, shape by shape, on several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from autopar.api.planning import Request, capture_request, make_request
from autopar.estimation import EstimateRow, cluster_of, open_shape, pins_of
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
        found.update((record.row, record.values) for record in records)
        if progress is not None:
            progress(len(found))
    return [found[row.row] for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowRecord:
    row: int
    values: Record


def _groups(rows: Sequence[EstimateRow]) -> list[tuple[EstimateRow, ...]]:
    """Rows of one shape, the largest work first, so that no process ends long after the others."""
    by_shape: dict[object, list[EstimateRow]] = {}
    for row in rows:
        by_shape.setdefault(row.shape, []).append(row)
    return sorted(map(tuple, by_shape.values()), key=lambda group: -len(group))


def _spread(
    groups: Sequence[tuple[EstimateRow, ...]], jobs: int
) -> Iterator[tuple[_RowRecord, ...]]:
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


def _estimate_group(rows: tuple[EstimateRow, ...]) -> tuple[_RowRecord, ...]:
    """Rows of one shape."""
    shape = _Shape()
    return tuple(_RowRecord(row=row.row, values=shape.record(row)) for row in rows)


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
