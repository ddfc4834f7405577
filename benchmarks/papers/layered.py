"""Lamy-Poirier 2021, *Layered gradient accumulation and modular pipeline parallelism*: the shortest
training of a trillion-parameter model.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.api.plots import Points, lines
from autopar.estimation import ModelShape
from autopar.ir.plan import RecomputeName, ScheduleName
from autopar.ir.schedules import compact_schedule, contiguous_stages, modular_stages
from autopar.solver import Cluster
from autopar.solver.estimate import Estimator
from autopar.solver.layout.model_facts import ModelFacts
from autopar.solver.simulate import SegmentTimes, simulate
from autopar.solver.training_length import TrainingLength
from benchmarks.papers.pages import Finding, findings, table
from benchmarks.papers.study import Found, Layout, numerics, shape_facts

TRILLION = ModelShape(
    hidden=25_600,
    layers=160,
    heads=160,
    kv_heads=160,
    ffn=4 * 25_600,
    mlp="gelu4h",
    vocab=51_200,
    seq=2560,
)
KERNEL = "flash_attention2 + fused pointwise"
GPUS_PER_NODE = 16
GPU_LIMIT = 40_000
NETWORKS = (25, 50, 100, 200, 400, 800, 1600, 3200)
FULL_NETWORK = 3200
ETHERNET = 25 * GPUS_PER_NODE
"""Gb/s out of a node."""


LENGTH = TrainingLength.at_critical_batch(1e5, critical_batch=2420)
_DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How micro-batches are ordered, and blocks dealt to stages."""

    name: str
    schedule: ScheduleName
    modular: bool
    zero_stages: Sequence[int]


METHODS: Sequence[Method] = (
    Method(name="1F1B", schedule="1f1b", modular=False, zero_stages=(1, 2, 3)),
    Method(name="layered", schedule="layered", modular=False, zero_stages=(1, 2, 3)),
    Method(name="layered, modular", schedule="layered", modular=True, zero_stages=(1, 2, 3)),
    Method(name="interleaved 1F1B", schedule="interleaved", modular=True, zero_stages=(1,)),
)
BASELINE, LAYERED, MODULAR, INTERLEAVED = (method.name for method in METHODS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The meshes that are looked at; the batch is the largest that is not above the critical."""

    tp: int = GPUS_PER_NODE
    pp: Sequence[int] = (1, 2, 4, 5, 10, 20, 40, 80, 160)
    micro_batches: Sequence[int] = (1, 2, 3, 4, 5, 8, 10, 16, 20, 40, 80, 172, 320)
    fewest_gpus: int = 4_000
    most_gpus: int = 80_000

    def layouts(
        self, method: Method, layers: int, batch: int, recompute: RecomputeName
    ) -> Iterator[tuple[Layout, int]]:
        """Layouts of a method, each with its number of micro-batches."""
        for pp, num, zero in itertools.product(self.pp, self.micro_batches, method.zero_stages):
            virtual = layers // pp if method.modular and pp > 1 else 1
            dp = batch // num
            gpus = self.tp * pp * dp
            if layers % pp or dp < 1 or not self.fewest_gpus <= gpus <= self.most_gpus:
                continue
            if method.modular and virtual == 1:
                continue  # nothing is modular
            if method.schedule == "layered" and not method.modular and pp > 1:
                continue  # the next stage would wait for all micro-batches
            if method.schedule == "1f1b" and zero > 1 and pp > 10:
                continue  # it gathers or reduces for every micro-batch, and there are many
            if dp == 1 and zero != method.zero_stages[0]:
                continue
            layout = Layout(
                tp=self.tp,
                pp=pp,
                dp=dp,
                recompute=recompute,
                sequence_parallel=True,
                zero_stage=zero,
                kernel=KERNEL,
                schedule=method.schedule,
                virtual_stages=virtual,
            )
            yield layout, num


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A layout, its estimate, and the training that it makes."""

    method: str
    found: Found
    num_micro_batches: int
    days: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A model, trained on as many GPUs as a layout wants, ``node_gbps`` out of each node."""

    facts: ModelFacts
    layers: int
    space: Space = field(default_factory=Space)
    length: TrainingLength = LENGTH
    gpus_per_node: int = GPUS_PER_NODE
    methods: Sequence[Method] = METHODS

    def runs(
        self, node_gbps: float = FULL_NETWORK, recompute: RecomputeName = "full"
    ) -> Sequence[Run]:
        """All layouts of all methods that fit."""
        cluster = Cluster(
            "a100-80gb",
            nodes=math.ceil(self.space.most_gpus / self.gpus_per_node),
            gpus_per_node=self.gpus_per_node,
        ).with_network(node_gbps)
        estimator = Estimator(self.facts, cluster, training=numerics())
        runs: list[Run] = []
        for method in self.methods:
            for layout, num in self.space.layouts(
                method, self.layers, int(self.length.critical_batch), recompute
            ):
                batch = num * layout.dp
                estimate = estimator(layout.pins(), global_batch_size=batch)
                if not estimate.fits:
                    continue
                runs.append(
                    Run(
                        method=method.name,
                        found=Found(layout=layout, estimate=estimate),
                        num_micro_batches=num,
                        days=self.length.seconds(batch, estimate.step_s) / _DAY_S,
                    )
                )
        return runs


def shortest(
    runs: Sequence[Run], method: str, limit: int = GPU_LIMIT, *, most_gib: float = math.inf
) -> Run | None:
    """The shortest training by a method on at most ``limit`` GPUs; None where nothing fits."""
    fitting = [
        run
        for run in runs
        if run.method == method and run.found.layout.num_gpus <= limit and run.found.gib <= most_gib
    ]
    return min(fitting, key=lambda run: run.days, default=None)


def efficiency(num_stages: int, virtual_stages: int, num_micro_batches: int) -> float:
    """Compute over all of a step whose only loss is the bubble: 1F1B where a stage is one segment,
    and layered with a modular pipeline otherwise.
    """
    contiguous = virtual_stages == 1
    stages = (contiguous_stages if contiguous else modular_stages)(num_stages, virtual_stages)
    ones = (1.0,) * len(stages)
    simulation = simulate(
        compact_schedule("1f1b" if contiguous else "layered", stages, num_micro_batches),
        SegmentTimes(
            forward_s=ones,
            backward_s=(3.0,) * len(stages),  # with the forward again
            gather_s=(0.0,) * len(stages),
            reduce_s=(0.0,) * len(stages),
            send_s=(0.0,) * len(stages),
            held_bytes=(0,) * len(stages),
        ),
        optimizer_s=(0.0,) * num_stages,
    )
    return max(simulation.busy_s) / simulation.step_s


def bubble_table() -> str:
    """The paper's two layouts, when nothing but the bubble is lost."""
    cases = (("contiguous, 1F1B", 160, 1, 172), ("modular, layered", 5, 32, 5))
    rows = [
        (name, pp, virtual, num, f"{efficiency(pp, virtual, num):.3f}")
        for name, pp, virtual, num in cases
    ]
    return table(("", "stages", "virtual stages", "micro-batches", "efficiency"), rows)


def run_table(runs: Mapping[str, Run | None], head: str) -> str:
    """A line for each run."""
    rows: list[Sequence[object]] = []
    for name, run in runs.items():
        if run is None:
            rows.append((name, "nothing fits"))
            continue
        layout, found = run.found.layout, run.found
        rows.append(
            (
                name,
                f"{layout.num_gpus:,}",
                layout.pp,
                layout.dp,
                run.num_micro_batches,
                layout.zero_stage,
                f"{found.seconds:.1f}",
                f"{found.mfu:.0%}",
                f"{found.gib:.1f}",
                f"{run.days:.1f}",
            )
        )
    columns = ("GPUs", "pp", "dp", "micro-batches", "ZeRO", "step s", "MFU", "GiB", "days")
    return table((head, *columns), rows)


def causes_table(runs: Mapping[str, Run | None]) -> str:
    """Seconds by cause of the busiest stage's ranks."""
    found = {name: run.found for name, run in runs.items() if run is not None}
    causes = {name: of.causes() for name, of in found.items()}
    rows = [
        (cause, *(f"{of.get(cause, 0.0):.2f}" for of in causes.values()))
        for cause in next(iter(causes.values()))
    ]
    return table(("seconds", *found), rows)


def memory_table(runs: Mapping[str, Run | None]) -> str:
    """GiB by cause of the fullest rank."""
    found = {name: run.found for name, run in runs.items() if run is not None}
    causes = {
        name: max(of.estimate.prediction.ranks, key=lambda rank: rank.peak_bytes).bytes_by_cause
        for name, of in found.items()
    }
    rows = [
        (cause, *(f"{of.get(cause, 0) / 2**30:.2f}" for of in causes.values()))
        for cause in next(iter(causes.values()))
        if any(of.get(cause, 0) >= 2**20 for of in causes.values())
    ]
    return table(("GiB", *found), rows)


def network_table(by_network: Mapping[int, Sequence[Run]]) -> str:
    """Step seconds of the best layout of each method, by Gb/s out of a node."""
    rows: list[Sequence[object]] = []
    full = by_network[max(by_network)]
    for gbps, runs in by_network.items():
        cells: list[str] = []
        for method in METHODS:
            run, fast = shortest(runs, method.name), shortest(full, method.name)
            if run is None or fast is None:
                cells += ["–", "–"]
                continue
            cells += [f"{run.days:.1f}", f"{run.days / fast.days:.2f}"]
        rows.append((f"{gbps:,}", *cells))
    head = [part for method in METHODS for part in (f"{method.name}", "ratio")]
    return table(("Gb/s", *head), rows)


def fixed_table(chosen: Mapping[str, Run | None], estimate: Callable[[Run, int], Found]) -> str:
    """Step seconds of given layouts, by Gb/s out of a node."""
    found = {name: run for name, run in chosen.items() if run is not None}
    rows = [
        (f"{gbps:,}", *(f"{estimate(run, gbps).seconds:.1f}" for run in found.values()))
        for gbps in NETWORKS
    ]
    return table(("Gb/s", *found), rows)


def enough_network(by_network: Mapping[int, Sequence[Run]], method: str) -> int | None:
    """The least Gb/s out of a node at which the training takes at most 10 % longer than at the
    most.
    """
    fast = shortest(by_network[max(by_network)], method)
    for gbps in sorted(by_network):
        run = shortest(by_network[gbps], method)
        if run is not None and fast is not None and run.days <= 1.1 * fast.days:
            return gbps
    return None


def what_holds(by_network: Mapping[int, Sequence[Run]]) -> Sequence[Finding]:
    """The paper's claims."""
    full = by_network[max(by_network)]
    base, best = shortest(full, BASELINE), shortest(full, MODULAR)
    assert base is not None
    assert best is not None
    rival = shortest(full, INTERLEAVED)
    small = shortest(full, MODULAR, most_gib=16)
    ethernet = shortest(by_network.get(ETHERNET, ()), MODULAR)
    enough = {name: enough_network(by_network, name) for name in (BASELINE, MODULAR)}
    ratio = base.days / best.days
    return (
        Finding(
            paper="both methods together cut the shortest training time by half",
            ours=f"{base.days:.1f} days become {best.days:.1f} on at most {GPU_LIMIT:,} GPUs: "
            f"{ratio:.2f} times less",
            agrees=ratio > 1.75,
        ),
        Finding(
            paper="memory is no wall: a few GB of a GPU are enough",
            ours=f"{small.days:.1f} days in {small.found.gib:.1f} GiB (ZeRO "
            f"{small.found.layout.zero_stage}, context and all), {best.days:.1f} days "
            f"in {best.found.gib:.1f} GiB"
            if small
            else "nothing fits 16 GiB",
            agrees=small is not None and small.days <= 1.05 * best.days,
        ),
        Finding(
            paper="a fast InfiniBand network is not necessary",
            ours=f"{enough[MODULAR]:,} Gb/s a node are within 10 % of {max(by_network):,} for "
            f"layered and modular, {enough[BASELINE]:,} for 1F1B"
            + (
                f"; over Ethernet of {ETHERNET} Gb/s it takes {ethernet.days:.1f} days, 1F1B over "
                f"{max(by_network):,} Gb/s {base.days:.1f}"
                if ethernet
                else ""
            ),
            agrees=(enough[MODULAR] or 0) <= ETHERNET,
        ),
        Finding(
            paper="interleaved 1F1B, of the same year, is not compared",
            ours=f"{rival.days:.1f} days" if rival else "does not fit where it is as short",
            agrees=None,
        ),
    )


def by_zero_stage(runs: Sequence[Run]) -> Mapping[str, Run | None]:
    """The shortest training of the layered, modular order at each stage of ZeRO."""
    return {
        f"ZeRO {stage}": shortest(
            [run for run in runs if run.found.layout.zero_stage == stage], MODULAR
        )
        for stage in (1, 2, 3)
    }


def days_by_gpus(runs: Sequence[Run]) -> Mapping[str, Points]:
    """The shortest training of each method on at most so many GPUs."""
    found: dict[str, list[tuple[float, float]]] = {}
    for method in METHODS:
        for limit in (5_000, 10_000, 20_000, 40_000, 80_000):
            run = shortest(runs, method.name, limit)
            if run is not None:
                found.setdefault(method.name, []).append((limit, run.days))
    return found


def main() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Parts and plots of the page."""
    study = Study(facts=shape_facts(TRILLION), layers=TRILLION.layers)
    limited = replace(study, space=replace(study.space, most_gpus=GPU_LIMIT))
    runs = study.runs()
    by_network = {gbps: limited.runs(gbps) for gbps in NETWORKS[:-1]} | {FULL_NETWORK: runs}
    kept = limited.runs(recompute="none")
    names = [method.name for method in METHODS]
    chosen = {name: shortest(runs, name) for name in names}

    @functools.lru_cache
    def at(gbps: int) -> Estimator:
        nodes = study.space.most_gpus // GPUS_PER_NODE
        cluster = Cluster("a100-80gb", nodes=nodes, gpus_per_node=GPUS_PER_NODE)
        return Estimator(study.facts, cluster.with_network(gbps), training=numerics())

    def again(run: Run, gbps: int) -> Found:
        layout = run.found.layout
        batch = layout.dp * run.num_micro_batches
        return Found(layout=layout, estimate=at(gbps)(layout.pins(), global_batch_size=batch))

    parts = {
        "findings": findings(what_holds(by_network)),
        "bubbles": bubble_table(),
        "shortest": run_table(chosen, "order"),
        "causes": causes_table(chosen),
        "kept": run_table({name: shortest(kept, name) for name in names}, "nothing recomputed"),
        "memory": memory_table(chosen),
        "zero": run_table(by_zero_stage(runs), LAYERED + ", modular"),
        "fixed": fixed_table(chosen, again),
        "network": network_table(by_network),
    }
    steps = {
        name: [
            (gbps, run.days)
            for gbps, found in by_network.items()
            if (run := shortest(found, name)) is not None
        ]
        for name in names
    }
    plots = {
        "layered-days": lines(
            "A trillion parameters: shortest training", "GPUs, at most", "days", days_by_gpus(runs)
        ),
        "layered-network": lines(
            f"Shortest training on at most {GPU_LIMIT:,} GPUs", "Gb/s out of a node", "days", steps
        ),
    }
    return parts, plots
