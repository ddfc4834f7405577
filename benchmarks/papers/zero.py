"""ZeRO (Rajbhandari et al. 2020): bytes per GPU by stage, and communication volume of a step.

Bytes are those of the planner's memory account, volumes are counted from the gathers and reductions
of the schedule that the runtime would execute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.api.plots import stacked
from autopar.estimation import ModelShape
from autopar.ir.plan import PrecisionName, ScheduleName
from autopar.ir.schedule import Action, ActionKind
from autopar.solver import Cluster
from autopar.solver.solved import Solved
from benchmarks.papers.pages import Finding, findings, table
from benchmarks.papers.study import Found, Layout, Study, numerics, shape_facts

GPT_7B = ModelShape(
    hidden=4096,
    layers=36,
    heads=32,
    kv_heads=32,
    ffn=16384,
    mlp="gelu4h",
    vocab=51200,
    seq=1024,
)
RANKS = 64
STATES = ("parameters", "master weights", "optimizer", "gradients")
NAMES = {0: "DDP", 1: "ZeRO 1", 2: "ZeRO 2 (FSDP `SHARD_GRAD_OP`)", 3: "ZeRO 3 (FSDP `FULL_SHARD`)"}
PUBLISHED_GB = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.88}
"""Figure 1 of the paper: 7.5 billion parameters on 64 GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """What a rank of stage 0 sends in a step for parameters and gradients.

    Attributes:
        gathers, reductions: How many collectives of segments.
        elements: Of all of them, by ring algorithms.
    """

    gathers: int
    reductions: int
    elements: float


def formula_bytes(numel: float, stage: int, ranks: int, *, gradient: int = 2) -> float:
    """Bytes of model states under mixed precision with Adam, section 5 of the paper.

    2 bytes of parameters, ``gradient`` bytes of gradients (2 in the paper), 12 of fp32 parameters
    and moments, for each of ``numel`` parameters; stage 1, 2 and 3 divide the last, the second and
    the first by ``ranks``, too.
    """
    divided = [1 if stage < n else ranks for n in (3, 2, 1)]
    return numel * sum(size / n for size, n in zip((2, gradient, 12), divided, strict=True))


def state_bytes(found: Found) -> int:
    """Bytes of model states in the account of the fullest rank."""
    fullest = max(found.estimate.prediction.ranks, key=lambda rank: rank.peak_bytes)
    return sum(fullest.bytes_by_cause[cause] for cause in STATES)


def volume(solved: Solved) -> Volume:
    """Counted from the actions of stage 0."""
    candidate, numel = solved.candidate, solved.stager.costs.numel
    share = (candidate.dp - 1) / candidate.dp  # of a tensor that a ring's rank passes on
    gathers = reductions = 0
    elements = 0.0
    for item in solved.schedule.items[0]:
        if not isinstance(item, Action) or item.segment < 0:
            continue
        _, first, last = solved.segments[item.segment]
        whole = share * float(numel[first : last + 1].sum())
        if item.kind is ActionKind.GATHER_PARAMETERS and candidate.zero_stage:
            gathers += 1
            elements += whole
        elif item.kind is ActionKind.REDUCE_GRADIENTS:
            reductions += 1
            elements += whole if candidate.zero_stage else 2 * whole  # all-reduce
    return Volume(gathers=gathers, reductions=reductions, elements=elements)


def num_parameters(study: Study) -> int:
    """Elements of the model's parameters, each counted once."""
    return round(float(study.solved(Layout(dp=1, zero_stage=0)).stager.costs.numel.sum()))


def layouts(dp: int) -> Sequence[Layout]:
    """Every stage, with everything recomputed, as the paper's runs."""
    return [Layout(dp=dp, zero_stage=stage, recompute="full") for stage in range(4)]


def bytes_table(shape: ModelShape, cluster: Cluster, gradients: PrecisionName) -> str:
    """Bytes of model states beside the paper's formula, and the whole peak."""
    dp = cluster.num_gpus
    study = Study(shape_facts(shape), cluster, global_batch_size=dp, training=numerics(gradients))
    numel, width = num_parameters(study), {"bf16": 2, "fp32": 4}[gradients]
    half = replace(layouts(dp)[3], replicas=max(1, dp // cluster.gpus_per_node))
    rows: list[Sequence[object]] = []
    for layout in (*layouts(dp), half):
        shards = dp // layout.replicas
        expected = formula_bytes(numel, layout.zero_stage, shards, gradient=width)
        found = study(layout)
        published = PUBLISHED_GB[layout.zero_stage]
        whole = layout.replicas == 1
        rows.append(
            (
                NAMES[layout.zero_stage] if whole else "ZeRO 3 in each node (`HYBRID_SHARD`)",
                f"{published:.3g}" if whole and width == 2 else "–",
                f"{expected / 1e9:.4g}",
                f"{state_bytes(found) / 1e9:.4g}",
                f"{found.estimate.peak_bytes / 1e9:.1f}",
                "yes" if found.estimate.fits else "no",
            )
        )
    head = ("", "paper", "formula", "autopar", "whole peak", f"fits {cluster.name}")
    return table(head, rows)


def volume_rows(study: Study, layout: Layout) -> Sequence[object]:
    """One line of the table of volumes."""
    numel, dp = num_parameters(study), layout.dp
    counted, found = volume(study.solved(layout)), study(layout)
    causes = found.causes()
    return (
        NAMES[layout.zero_stage].partition(" (")[0],
        study.global_batch_size // dp,
        layout.schedule,
        counted.gathers,
        counted.reductions,
        f"{counted.elements / (numel * (dp - 1) / dp):.3f} Ψ",
        f"{2 * counted.elements / 1e9:.1f}",
        f"{found.seconds:.2f}",
        f"{causes['exposed data-parallel communication'] / found.seconds:.0%}",
    )


def volume_table(shape: ModelShape, cluster: Cluster, micro_batches: int) -> str:
    """Volume of a step by stage, for one micro-batch and for several, in both orders."""
    dp = cluster.num_gpus
    rows: list[Sequence[object]] = []
    for num in (1, micro_batches):
        study = Study(shape_facts(shape), cluster, global_batch_size=dp * num)
        for layout in layouts(dp):
            rows.append(volume_rows(study, layout))
            if num > 1 and layout.zero_stage:
                rows.append(volume_rows(study, replace(layout, schedule="layered")))
    head = (
        "",
        "micro-batches",
        "order",
        "gathers",
        "reductions",
        "volume",
        "GB",
        "step s",
        "exposed",
    )
    return table(head, rows)


def what_holds(study: Study, micro_batches: int) -> Sequence[Finding]:
    """The paper's claims, and what accumulation does to them."""
    dp = study.cluster.num_gpus
    several = Study(study.facts, study.cluster, global_batch_size=dp * micro_batches)
    numel = num_parameters(study)
    unit = numel * (dp - 1) / dp

    def of(study: Study, stage: int, schedule: ScheduleName = "1f1b") -> float:
        layout = replace(layouts(dp)[stage], schedule=schedule)
        return volume(study.solved(layout)).elements / unit

    saved = state_bytes(study(layouts(dp)[0])) / state_bytes(study(layouts(dp)[3]))
    accumulated, layered = of(several, 2), of(several, 2, "layered")
    return (
        Finding(
            paper=f"stage 3 divides the bytes of model states by the {dp} ranks",
            ours=f"{saved:.1f} times less",
            agrees=abs(saved / dp - 1) < 1e-6,
        ),
        Finding(
            paper="stages 1 and 2 send as much as data parallelism: 2 Ψ",
            ours=f"{of(study, 1):.3f} Ψ and {of(study, 2):.3f} Ψ for one micro-batch",
            agrees=abs(of(study, 2) / of(study, 0) - 1) < 1e-6,
        ),
        Finding(
            paper="stage 3 sends 1.5 times as much: 3 Ψ",
            ours=f"{of(study, 3):.3f} Ψ for one micro-batch",
            agrees=abs(of(study, 3) / 3 - 1) < 0.05,
        ),
        Finding(
            paper="gradient accumulation is left out",
            ours=f"stage 2 sends {accumulated:.3f} Ψ for {micro_batches} micro-batches, one after "
            f"the other: it reduces after each of them, where DDP reduces once",
            agrees=None,
        ),
        Finding(
            paper="layered accumulation restores it (Lamy-Poirier 2021)",
            ours=f"stage 2 sends {layered:.3f} Ψ, stage 3 {of(several, 3, 'layered'):.3f} Ψ for "
            f"{micro_batches} micro-batches",
            agrees=abs(layered / of(several, 0) - 1) < 1e-6,
        ),
    )


def main() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Parts and plots of the page."""
    cluster = Cluster("a100-80gb", nodes=RANKS // 8)
    study = Study(shape_facts(GPT_7B), cluster, global_batch_size=RANKS)
    bars = {}
    for layout in layouts(RANKS):
        rank = study(layout).estimate.prediction.ranks[0]
        states = {cause: rank.bytes_by_cause[cause] / 1e9 for cause in STATES}
        states["all else"] = rank.peak_bytes / 1e9 - sum(states.values())
        bars[NAMES[layout.zero_stage].replace(" (", "\n(").replace("`", "")] = states
    numel = num_parameters(study)
    slow = cluster.with_network(200)
    parts = {
        "size": f"Ψ = {numel:,} parameters on {RANKS} ranks of {cluster.name}.",
        "findings": findings(what_holds(study, 8)),
        "bytes-bf16": bytes_table(GPT_7B, cluster, "bf16"),
        "bytes-fp32": bytes_table(GPT_7B, cluster, "fp32"),
        "volume": volume_table(GPT_7B, cluster, 8),
        "volume-200": volume_table(GPT_7B, slow, 8),
    }
    return parts, {"zero-bytes": stacked("Bytes of a rank by ZeRO stage", "GB", bars)}
