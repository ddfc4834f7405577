"""``sweep``: the best step over GPU counts, batches or lengths: a table and a plot."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Unpack, get_args

from torch import nn

from autopar.api.arguments import OpenArguments, Progress, SweepArguments, check_names, only
from autopar.api.goal import clusters_of
from autopar.api.planning import capture_model
from autopar.api.plots import lines, panels
from autopar.api.request import Request, open_request
from autopar.ir.errors import AutoparError, InputError
from autopar.ir.tables import columns
from autopar.ir.units import bytes_text, seconds_text
from autopar.solver import Cluster
from autopar.solver.instance import Instance, make_instance
from autopar.solver.layout.model_facts import ModelFacts, model_facts
from autopar.solver.predict import predict

Over = Literal["gpus", "batch", "length"]
_HEADS: Mapping[Over, str] = {"gpus": "GPUs", "batch": "batch", "length": "tokens"}
_DOES_NOT_FIT = "does not fit into memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """The best step at one point. ``error`` says why there is none; all predictions are None then.

    Attributes:
        bound_s: No step is faster, in this cost model.
        peak_bytes: Of the fullest rank, which has ``usable_bytes``.
        description: The decisions.
    """

    num_gpus: int
    global_batch_size: int
    seq_len: int | None
    step_s: float | None = None
    bound_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    peak_bytes: int | None = None
    usable_bytes: int
    description: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The points of a sweep, in order. Prints itself as a table."""

    model: str
    over: Over
    points: tuple[SweepPoint, ...]

    def value(self, point: SweepPoint) -> int:
        """What the sweep is over, at a point."""
        values = {
            "gpus": point.num_gpus,
            "batch": point.global_batch_size,
            "length": point.seq_len or 0,
        }
        return values[self.over]

    def table(self) -> str:
        """The points as text."""
        head = (_HEADS[self.over], "step", "tokens/s", "MFU", "memory", "gap", "decisions")
        return columns(head, [self._row(point) for point in self.points], left=(0, 6))

    def _row(self, point: SweepPoint) -> Sequence[str]:
        first = f"{self.value(point):,}"
        if point.step_s is None or point.bound_s is None:
            return (first, "–", "–", "–", "–", "–", point.error or "")
        return (
            first,
            seconds_text(point.step_s),
            f"{point.tokens_per_s:,.0f}",
            f"{point.mfu:.1%}",
            bytes_text(point.peak_bytes or 0),
            f"{1 - point.bound_s / point.step_s:.2%}",
            point.description or "",
        )

    def csv(self) -> str:
        """The points as CSV, with the fields of ``SweepPoint`` as columns."""
        text = io.StringIO()
        writer = csv.DictWriter(
            text, fieldnames=list(asdict(self.points[0])), restval="", lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(asdict(point) for point in self.points)
        return text.getvalue()

    def plot(self) -> str:
        """Step time, speed, MFU and memory as an SVG.

        Raises:
            InputError: Nothing fits at any point.
        """
        found = [point for point in self.points if point.step_s is not None]
        if not found:
            raise InputError("nothing fits at any point, so that there is nothing to plot")

        def panel(title: str, y: str, **series: Sequence[float]) -> str:
            named = {
                name.replace("_", " "): [
                    (float(self.value(point)), value)
                    for point, value in zip(found, values, strict=True)
                ]
                for name, values in series.items()
            }
            return lines(f"{self.model}: {title}", _HEADS[self.over], y, named)

        gib = 2.0**30
        return panels(
            (
                panel(
                    "seconds of a step",
                    "seconds",
                    best_found=[point.step_s or 0.0 for point in found],
                    lower_bound=[point.bound_s or 0.0 for point in found],
                ),
                panel("speed", "tokens/s", tokens_per_s=[p.tokens_per_s or 0.0 for p in found]),
                panel("model FLOPs utilization", "%", MFU=[100 * (p.mfu or 0.0) for p in found]),
                panel(
                    "memory of the fullest rank",
                    "GiB",
                    needed=[(point.peak_bytes or 0) / gib for point in found],
                    usable=[point.usable_bytes / gib for point in found],
                ),
            )
        )

    def __str__(self) -> str:
        return self.table()


def sweep(
    model: str | Path | nn.Module,
    cluster: Cluster,
    over: Over,
    values: Sequence[int],
    **arguments: Unpack[SweepArguments],
) -> Sweep:
    """The best step at each of ``values``.

    Args:
        over: ``gpus`` (whatever nodes the cluster has), ``batch`` (sequences of a step) or
            ``length`` (tokens of a sequence).
        values: GPU counts, global batches or sequence lengths.
        arguments: As of ``plan``; see ``SweepArguments`` (``autopar.api.arguments``).

    Raises:
        InputError: An argument is wrong. What goes wrong at one point is in that point.
        CaptureError: The model cannot be captured.
    """
    check_names("sweep", arguments, SweepArguments)
    if over not in get_args(Over):
        raise InputError(f"over is {over!r}; it can be {', '.join(get_args(Over))}")
    if not values or not all(isinstance(value, int) and value >= 1 for value in values):
        raise InputError(f"values are {list(values)}; give whole numbers, at least 1")
    swept = {"gpus": "gpus", "batch": "global_batch_size", "length": "seq_len"}[over]
    if arguments.get(swept) is not None:
        raise InputError(f"{swept} is given, but the sweep is over it")
    request = _request(model, cluster, only(OpenArguments, arguments), swept, values)
    progress = arguments.get("progress") or (lambda _: None)
    points: list[SweepPoint] = []
    solver = _Solver(request=request, progress=progress)
    for value in values:
        progress(f"{_HEADS[over]} {value}")
        if over == "gpus":
            points.append(solver.point(clusters_of(cluster, value)[0]))
        elif over == "batch":
            points.append(solver.point(global_batch_size=value))
        else:
            points.append(solver.point(seq_len=value))
    return Sweep(model=request.source.name, over=over, points=tuple(points))


def _request(
    model: str | Path | nn.Module,
    cluster: Cluster,
    given: OpenArguments,
    swept: str,
    values: Sequence[int],
) -> Request:
    """A request at one of the values: the largest where arguments hold."""
    refused: InputError | None = None
    for value in sorted(values, reverse=True):
        at = only(OpenArguments, {**given, swept: value})
        try:
            return open_request(model, cluster, at)
        except InputError as error:
            refused = error
    assert refused is not None
    raise refused


class _Solver:
    """Solves points of one request; what they share is worked out once."""

    def __init__(self, request: Request, progress: Progress) -> None:
        self.request, self.progress = request, progress
        self._facts: dict[int | None, ModelFacts] = {}
        self._instances: dict[int | None, Instance] = {}

    def point(
        self,
        cluster: Cluster | None = None,
        *,
        global_batch_size: int | None = None,
        seq_len: int | None = None,
    ) -> SweepPoint:
        """The best step where so much is other than in the request."""
        cluster = cluster or self.request.cluster
        batch = global_batch_size or self.request.global_batch_size
        seq_len = seq_len or self.request.seq_len
        bare = SweepPoint(
            num_gpus=cluster.num_gpus,
            global_batch_size=batch,
            seq_len=seq_len,
            usable_bytes=cluster.usable_bytes,
        )
        try:
            instance = self._instance(cluster, batch, seq_len)
            result = instance.search.run(instance.candidates)
        except AutoparError as error:
            return replace(bare, error=error.what)
        if result.best is None:
            return replace(bare, seq_len=instance.seq_len, error=_DOES_NOT_FIT)
        best = result.best
        prediction = predict(
            best,
            instance.facts.model,
            cluster,
            instance.training,
            global_batch_size=batch,
            seq_len=instance.seq_len,
        )
        return replace(
            bare,
            seq_len=instance.seq_len,
            step_s=best.step_s,
            bound_s=min(result.bound_s, best.step_s),
            tokens_per_s=prediction.tokens_per_s,
            mfu=prediction.mfu,
            peak_bytes=prediction.fullest.peak_bytes,
            usable_bytes=prediction.usable_bytes,
            description=str(best.candidate),
        )

    def _instance(self, cluster: Cluster, batch: int, seq_len: int | None) -> Instance:
        if seq_len in self._instances:
            return self._instances[seq_len].on(cluster, global_batch_size=batch)
        request = self.request
        if seq_len not in self._facts:
            graph = capture_model(request.source, seq_len, request.training.precision)
            self._facts[seq_len] = model_facts(graph)
        self._instances[seq_len] = make_instance(
            self._facts[seq_len],
            cluster,
            global_batch_size=batch,
            training=request.training,
            pin=request.pin,
            progress=self.progress,
        )
        return self._instances[seq_len]
