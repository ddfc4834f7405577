"""Plans beside what experts used: `python -m benchmarks.experts DATA`.

DATA is a folder of tables of runs (docs/reference/rows.md says their columns; tables of other
things are left out). Rows are grouped by all that a planner does not decide: model, GPUs, batch,
precisions and kernels. Each group is planned once, and each of its rows estimated as
`autopar estimate` does. A violation is a row whose layout fits and takes less than the plan, in the
same cost model. Of each it is said which of its choices the search leaves out; a row below what the
certificate proves, with none of them, is an error of a bound.

    python -m benchmarks.experts DATA --sample 20     some of the groups, drawn
    python -m benchmarks.experts DATA --series tag    rows whose id starts so
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script finds its own folder only
from autopar.api.planning import capture_request
from autopar.api.request import Request, make_request
from autopar.estimation import EstimateRow, ModelShape, cluster_of, open_shape, pins_of, read_rows
from autopar.ir.errors import AutoparError, InputError
from autopar.solver.candidates import Candidate
from autopar.solver.estimate import Estimate, Estimator
from autopar.solver.instance import Instance, make_instance
from autopar.solver.layout.model_facts import ModelFacts, model_facts
from autopar.solver.search_result import SearchResult
from autopar.solver.space import VIRTUAL_STAGES

_ROUNDING = 1e-9
_GIVEN = ("kernel", "precision", "comm_precision", "grads_fp32")
"""Pins of a row that are facts of its group."""

Group = Sequence[EstimateRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A row whose layout fits, beside the plan of its group.

    Attributes:
        plan_s, bound_s: Of the plan; infinite where none was found, or nothing can fit.
        outside: Choices of the row that the search leaves out.
    """

    row: EstimateRow
    layout: Candidate
    step_s: float
    plan_s: float
    bound_s: float
    outside: tuple[str, ...]

    @property
    def is_faster(self) -> bool:
        """Whether the row is faster than the plan."""
        return self.step_s < self.plan_s * (1 - _ROUNDING)

    @property
    def breaks_bound(self) -> bool:
        """Whether the row is in the space, and faster than all that is proved of it."""
        return not self.outside and self.step_s < self.bound_s * (1 - _ROUNDING)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each group and a table of violations; the status is 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts")
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("--sample", type=int, metavar="N", help="so many groups, drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--series", default="", metavar="TAG", help="rows whose id starts so")
    arguments = parser.parse_args(argv)
    rows = [row for row in all_rows(arguments.data) if row.id.startswith(arguments.series)]
    groups = groups_of(rows)
    if arguments.sample is not None:
        random.Random(arguments.seed).shuffle(groups)
        groups = groups[: arguments.sample]
    groups.sort(key=lambda group: repr(group[0].shape))  # one capture for each shape
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, seed "
        f"{arguments.seed}: {sum(map(len, groups))} rows in {len(groups)} groups"
    )
    compared: list[Compared] = []
    planner = Planner()
    for group in groups:
        started = time.perf_counter()
        try:
            found = list(planner.compare(group))
        except AutoparError as error:
            print(f"{group[0].id}: {error.what}", flush=True)
            continue
        compared += found
        print(_line(group, found, time.perf_counter() - started), flush=True)
    print_violations(compared)
    return 1 if any(row.is_faster for row in compared) else 0


def all_rows(folder: Path) -> Iterator[EstimateRow]:
    """The good rows of all tables of runs in a folder."""
    for path in sorted(folder.glob("*.csv")):
        try:
            yield from read_rows(path).rows
        except InputError as error:
            print(f"{path.name}: left out: {error.what}")


def groups_of(rows: Sequence[EstimateRow]) -> list[list[EstimateRow]]:
    """Rows that differ in decisions of a planner only."""
    groups: dict[tuple[object, ...], list[EstimateRow]] = {}
    for row in rows:
        given = pins_of(row)
        key = (
            row.shape,
            cluster_of(row).fingerprint,
            row.global_batch,
            *(given[name] for name in _GIVEN),
        )
        groups.setdefault(key, []).append(row)
    return list(groups.values())


class Planner:
    """Plans groups and estimates their rows; a shape is captured once, as long as it comes next."""

    def __init__(self) -> None:
        self._shape: ModelShape | None = None
        self._facts: dict[str, ModelFacts] = {}

    def compare(self, group: Group) -> Iterator[Compared]:
        """The rows of a group whose layouts fit, beside its plan.

        Raises:
            AutoparError: The model cannot be captured, or nothing can be planned.
        """
        instance = self.instance(group[0])
        result = instance.search.run(instance.candidates)
        estimator = Estimator(instance.facts, instance.cluster, training=instance.training)
        # of the same model and cluster
        estimator.refiner.pricer.settings = instance.search.pricer.settings
        for row in group:
            estimate = self._estimate(estimator, row)
            if estimate is not None and estimate.fits:
                yield _compared(row, estimate, instance, result)

    def instance(self, row: EstimateRow) -> Instance:
        """What is searched for the group of a row."""
        given = pins_of(row)
        request = self._request(row, {name: given[name] for name in _GIVEN})
        return make_instance(
            self._captured(row.shape, request),
            request.cluster,
            global_batch_size=row.global_batch,
            training=request.training,
            seq_len=row.shape.seq,
            pin=request.pin,
        )

    def _estimate(self, estimator: Estimator, row: EstimateRow) -> Estimate | None:
        pin = self._request(row, pins_of(row)).pin
        try:
            return estimator(pin, global_batch_size=row.global_batch)
        except AutoparError as error:
            print(f"  {row.id}: {error.what}")
            return None

    def _request(self, row: EstimateRow, pin: Mapping[str, int | str]) -> Request:
        return make_request(
            open_shape(row.shape),
            cluster_of(row),
            global_batch_size=row.global_batch,
            seq_len=row.shape.seq,
            pin=pin,
        )

    def _captured(self, shape: ModelShape, request: Request) -> ModelFacts:
        if shape != self._shape:
            self._shape, self._facts = shape, {}
        precision = request.training.precision
        if precision not in self._facts:
            self._facts[precision] = model_facts(capture_request(request))
        return self._facts[precision]


def _compared(
    row: EstimateRow, estimate: Estimate, instance: Instance, result: SearchResult
) -> Compared:
    return Compared(
        row=row,
        layout=estimate.candidate,
        step_s=estimate.step_s,
        plan_s=math.inf if result.best is None else result.best.step_s,
        bound_s=result.bound_s,
        outside=tuple(left_out(estimate.candidate, instance)),
    )


def left_out(layout: Candidate, instance: Instance) -> Iterator[str]:
    """Choices of a layout that ``docs/concepts/problem.md`` leaves out of the space."""
    if layout.recompute.startswith("selective"):
        yield f"recompute {layout.recompute}"
    in_node = max(1, instance.cluster.gpus_per_node // layout.tp)
    if layout.dp_shard not in (1, math.gcd(layout.dp, in_node), layout.dp):
        yield f"shards over {layout.dp_shard} of {layout.dp} data ranks"
    share = instance.global_batch_size // layout.dp
    if share % layout.micro_batch_size:
        yield "a shorter last micro-batch"
    if layout.tp > instance.cluster.gpus_per_node:
        yield "a tensor axis over nodes"
    if layout.virtual_stages > 1:
        yield "cuts of virtual stages"
        if layout.virtual_stages not in VIRTUAL_STAGES:
            yield f"{layout.virtual_stages} virtual stages"
        if layout.num_micro_batches < layout.pp:
            yield "fewer micro-batches than stages"


def _line(group: Group, found: Sequence[Compared], seconds: float) -> str:
    row = group[0]
    head = f"{row.id}… {row.shape.name} × {row.global_batch} on {row.world_size}, {row.kernel}"
    if not found:
        return f"{head}: none of {len(group)} rows fits; {seconds:.0f} s"
    best = min(found, key=lambda other: other.step_s)
    faster = sum(other.is_faster for other in found)
    return (
        f"{head}: {len(found)} of {len(group)} rows fit, {faster} faster than the plan; best row "
        f"{best.step_s:.5g} s, plan {best.plan_s:.5g} s ({best.step_s / best.plan_s:.3f}×), bound "
        f"{best.bound_s:.5g} s; {seconds:.0f} s"
    )


def print_violations(compared: Sequence[Compared]) -> None:
    """The rows that are faster than the plan, most first, and how many for each cause."""
    faster = sorted(
        (row for row in compared if row.is_faster), key=lambda row: row.step_s / row.plan_s
    )
    print(f"\n{len(compared)} rows that fit, {len(faster)} faster than the plan")
    for row in faster:
        cause = ", ".join(row.outside) or ("BELOW THE BOUND" if row.breaks_bound else "not found")
        print(
            f"{row.row.id:>10}  {row.step_s:9.5g} s of {row.plan_s:9.5g} s "
            f"({row.step_s / row.plan_s:.4f}×, bound {row.bound_s:.5g} s)  {row.layout}  | {cause}"
        )
    causes = Counter(", ".join(row.outside) or "not found" for row in faster)
    for cause, number in causes.most_common():
        print(f"{number:6} {cause}")
    broken = sum(row.breaks_bound for row in compared)
    print(f"{broken} rows of the space below what is proved of it")


if __name__ == "__main__":
    sys.exit(main())
