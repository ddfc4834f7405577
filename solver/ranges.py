"""The best over GPU counts and batches: a best-first search whose nodes are whole searches.

A node, one GPU count with one batch, is refined in three steps, each when its bound on the
objective is the lowest of all:

1. the FLOPs of the model's products at the peak of all GPUs;
2. the lowest scalar bound of its candidates (``Refiner.scalar``);
3. solved: the search over its candidates, with the bound that it proves.

The range ends when no bound is below the best value. What is then proved is the lowest bound of all
nodes, those that were cut included.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.ir.errors import InfeasibleError, InputError
from autopar.ir.graph import ModelGraph
from autopar.ir.plan import Plan, TrainingPlan
from autopar.ir.plan_search import CountPlan, ObjectivePlan
from autopar.ir.units import seconds_text
from autopar.solver.hardware import Cluster
from autopar.solver.infeasible import infeasible_error
from autopar.solver.instance import Instance, make_instance, sequence_length
from autopar.solver.layout.model_facts import ModelFacts, model_facts
from autopar.solver.objectives import FewestGpus, Objective, Point
from autopar.solver.offloading import run_instance
from autopar.solver.pins import Pins
from autopar.solver.predict import product_flops
from autopar.solver.search import Progress
from autopar.solver.search_result import SearchResult
from autopar.solver.solve import DescribeMoves, make_plan
from autopar.solver.warm_start import warm_candidates

_FEW_NODES, _LARGEST_FACTOR = 16, 7


@dataclass(slots=True, kw_only=True, eq=False)
class _Node:
    """A GPU count with a batch. ``bound_s`` bounds its step, ``result`` is there once solved."""

    cluster: Cluster
    point: Point
    bound_s: float
    instance: Instance | None = None
    result: SearchResult | None = None
    solve_s: float = 0.0

    @property
    def step_s(self) -> float:
        """The best step that was found; infinite where none was."""
        if self.result is None or self.result.best is None:
            return math.inf
        return self.result.best.step_s


def gpu_counts(cluster: Cluster, low: int, high: int) -> tuple[int, ...]:
    """GPU counts from ``low`` to ``high`` that make sense: whole nodes, or a divisor of one.

    Of many nodes those without a prime factor above 7: others have few meshes. A single count is
    taken as it is. Of several groups of nodes nobody knows which: ``Cluster.with_gpus`` refuses.
    """
    if cluster.is_mixed:
        return (low,) if low == high else (low, high)
    node = cluster.gpus_per_node
    parts = [count for count in range(1, min(node, high + 1)) if node % count == 0]
    whole = [
        nodes * node
        for nodes in range(1, high // node + 1)
        if nodes <= _FEW_NODES or low == high or _largest_factor(nodes) <= _LARGEST_FACTOR
    ]
    return tuple(count for count in (*parts, *whole) if count >= low)


def _largest_factor(number: int) -> int:
    """The largest prime factor of a number above 1."""
    factor = 2
    while factor * factor <= number:
        if number % factor:
            factor += 1
        else:
            number //= factor
    return number


def solve_range(
    model: ModelGraph | ModelFacts,
    points: Sequence[tuple[Cluster, int]],
    objective: Objective,
    *,
    training: TrainingPlan,
    seq_len: int | None = None,
    pin: Pins | None = None,
    source: str | None = None,
    describe_moves: DescribeMoves | None = None,
    what_if: bool = False,
    warm_start: Plan | None = None,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The plan with the least of ``objective``, with a certificate over all points.

    Args:
        model: The captured model, or its facts.
        points: Clusters with global batch sizes. Where the pins cannot hold, there is nothing.
        objective: What to minimize.
        warm_start: A plan whose decisions are tried first at every point.
        time_limit_s: Seconds after which nothing is begun, once something was found.

    All other arguments are those of ``solve``.

    Raises:
        InputError: The pins hold at no point.
        InfeasibleError: Nothing fits into memory, or nothing will do.
    """
    facts = model_facts(model) if isinstance(model, ModelGraph) else model
    seq_len = seq_len or sequence_length(facts.model)
    nodes = [_node(facts, seq_len, cluster, batch) for cluster, batch in points]

    def instance(node: _Node) -> Instance:
        for other in nodes:
            if other.instance is not None:
                return other.instance.on(
                    node.cluster, global_batch_size=node.point.global_batch_size
                )
        return make_instance(
            facts,
            node.cluster,
            global_batch_size=node.point.global_batch_size,
            training=training,
            seq_len=seq_len,
            pin=pin,
            progress=progress,
        )

    stop_at_s = math.inf if time_limit_s is None else time.perf_counter() + time_limit_s
    _search(nodes, objective, _Way(instance=instance, warm_start=warm_start, stop_at_s=stop_at_s))
    best = min(
        (node for node in nodes if math.isfinite(node.step_s)),
        key=lambda node: (objective.value(node.point, node.step_s), node.step_s),
        default=None,
    )
    value = math.inf if best is None else objective.value(best.point, best.step_s)
    if best is None or not math.isfinite(value):
        raise _nothing_will_do(nodes, objective)
    assert best.instance is not None
    assert best.result is not None
    plan = make_plan(
        best.instance,
        best.result,
        solve_s=best.solve_s,
        source=source,
        describe_moves=describe_moves,
        what_if=what_if,
    )
    bound = min(value, *(objective.value(node.point, node.bound_s) for node in nodes))
    return replace(
        plan,
        objective=ObjectivePlan(
            name=objective.name,
            unit=objective.unit,
            settings=objective.settings,
            value=value,
            bound=bound,
            gap=max(0.0, 1 - bound / value),
            by_count=tuple(_by_count(nodes, objective)),
        ),
    )


def _node(facts: ModelFacts, seq_len: int | None, cluster: Cluster, batch: int) -> _Node:
    point = Point(num_gpus=cluster.num_gpus, global_batch_size=batch, seq_len=seq_len or 1)
    peak = 0.0
    for group in cluster.groups:
        peaks = group.hardware.chip.peak_flops
        peak += max(peaks.bf16, peaks.fp32, peaks.float64) * group.num_gpus
    return _Node(cluster=cluster, point=point, bound_s=product_flops(facts.model, batch) / peak)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How nodes are refined."""

    instance: Callable[[_Node], Instance]
    warm_start: Plan | None
    stop_at_s: float


def _search(nodes: Sequence[_Node], objective: Objective, way: _Way) -> None:
    """Refine nodes until none can be better than the best, or time is up.

    Raises:
        InputError: No node has a mesh.
    """
    refused: list[InputError] = []
    best = math.inf

    def entry(number: int, step: int) -> tuple[float, int, int, int]:
        node = nodes[number]
        value = objective.value(node.point, node.bound_s)
        return value, node.point.num_gpus, number, step

    queue = [entry(number, 1) for number in range(len(nodes))]
    heapq.heapify(queue)
    while queue:
        value, _, number, step = heapq.heappop(queue)
        if not math.isfinite(value) or value >= best:
            break
        if math.isfinite(best) and time.perf_counter() >= way.stop_at_s:
            break
        node = nodes[number]
        if step == 1:
            try:
                _bound(node, way, is_only=len(nodes) == 1)
            except InputError as error:
                refused.append(error)
                node.bound_s = math.inf
                continue
            heapq.heappush(queue, entry(number, 2))
            continue
        _solve(node, way, objective.longest_step_s(node.point, best))
        best = min(best, objective.value(node.point, node.step_s))
    if len(refused) == len(nodes):
        raise refused[-1]


def _bound(node: _Node, way: _Way, *, is_only: bool) -> None:
    """The second step."""
    started = time.perf_counter()
    node.instance = way.instance(node)
    num, batch = node.point.num_gpus, node.point.global_batch_size
    node.instance.search.progress(f"bounding {num} GPUs with a batch of {batch}")
    if not is_only:  # otherwise it is searched in any case
        node.bound_s = max(node.bound_s, _lowest_bound(node.instance))
    node.solve_s += time.perf_counter() - started


def _lowest_bound(instance: Instance) -> float:
    """The lowest scalar bound of the candidates; only those that may have it are asked for it."""
    refiner, candidates = instance.search.refiner, instance.candidates
    queue = [(refiner.rough(found), number, 1) for number, found in enumerate(candidates)]
    heapq.heapify(queue)
    while True:
        bound, number, step = queue[0]
        if step == 2 or not math.isfinite(bound):
            return bound
        scalar = refiner.scalar(candidates[number])
        heapq.heapreplace(queue, (max(bound, scalar), number, 2))


def _solve(node: _Node, way: _Way, cutoff_s: float) -> None:
    """The third step; steps longer than ``cutoff_s`` are worse than what is known."""
    assert node.instance is not None
    started, found = time.perf_counter(), node.instance.candidates
    first = () if way.warm_start is None else warm_candidates(way.warm_start, found)
    node.instance, node.result = run_instance(
        node.instance, first=first, cutoff_s=cutoff_s, stop_at_s=way.stop_at_s
    )
    node.bound_s = max(node.bound_s, node.result.bound_s)
    node.solve_s += time.perf_counter() - started


def _by_count(nodes: Sequence[_Node], objective: Objective) -> list[CountPlan]:
    """The best node of each GPU count, fewest GPUs first."""
    by_count: dict[int, list[_Node]] = {}
    for node in nodes:
        by_count.setdefault(node.point.num_gpus, []).append(node)
    found: list[CountPlan] = []
    for num_gpus in sorted(by_count):
        node = min(
            by_count[num_gpus],
            key=lambda node: (
                objective.value(node.point, node.step_s),
                objective.value(node.point, node.bound_s),
                node.bound_s,
            ),
        )
        best = None if node.result is None else node.result.best
        value = objective.value(node.point, node.step_s)
        bound = min(objective.value(node.point, node.bound_s) for node in by_count[num_gpus])
        found.append(
            CountPlan(
                num_gpus=num_gpus,
                global_batch_size=node.point.global_batch_size,
                step_s=None if best is None else best.step_s,
                value=value if math.isfinite(value) else None,
                bound=bound if math.isfinite(bound) else None,
                description=None if best is None else str(best.candidate),
            )
        )
    return found


def _nothing_will_do(nodes: Sequence[_Node], objective: Objective) -> InfeasibleError:
    """Nothing fits, or the deadline is too early for all that fit."""
    fitting = [node for node in nodes if math.isfinite(node.bound_s)]
    if not fitting or not isinstance(objective, FewestGpus):
        largest = max(
            (node for node in nodes if node.instance is not None),
            key=lambda node: node.point.num_gpus,
        )
        assert largest.instance is not None
        return infeasible_error(largest.instance)
    node = min(
        fitting,
        key=lambda node: node.bound_s / objective.step_deadline_s(node.point.global_batch_size),
    )
    point = node.point
    deadline_s = objective.step_deadline_s(point.global_batch_size)
    return InfeasibleError(
        f"no number of GPUs that was asked for makes steps of {point.global_batch_size} sequences "
        f"in {seconds_text(deadline_s)}: {point.num_gpus} take at least "
        f"{seconds_text(node.bound_s)}",
        hint="more GPUs, a later deadline, or a smaller batch",
    )
