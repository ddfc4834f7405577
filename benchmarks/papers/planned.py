"""Recommendations that the planner itself makes: nothing is pinned but the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autopar.capture import open_model
from autopar.ir.plan import Plan
from autopar.solver import Cluster, solve
from autopar.solver.layout.model_facts import ModelFacts
from benchmarks.papers.cases import LENGTHS, LLAMAS, OTHERS, TOKENS
from benchmarks.papers.pages import table
from benchmarks.papers.study import FUSED, numerics, source_facts
from benchmarks.papers.sweep import length

MIXTRAL = Path(__file__).parents[2] / "examples" / "configs" / "mixtral-8x7b"


def planned(facts: ModelFacts, cluster: Cluster, seq: int, *, batch: int | None = None) -> Plan:
    """The planner's choice; for as many tokens a step as the sweeps have, unless told otherwise."""
    return solve(
        facts.model,
        cluster,
        global_batch_size=batch or TOKENS // seq,
        training=numerics(),
        seq_len=seq,
        pin={"kernel": FUSED},
    )


def row(name: str, seq: int, plan: Plan) -> Sequence[object]:
    """A line of the table."""
    mesh, peak = plan.mesh, max(rank.peak_bytes for rank in plan.prediction.ranks)
    return (
        name,
        length(seq),
        f"{plan.device_mesh().num_ranks} {plan.cluster.hardware.partition('-')[0].upper()}",
        plan.batch.micro_batch_size,
        mesh.tp,
        mesh.pp,
        mesh.ep,
        mesh.dp_replicate * mesh.dp_shard,
        plan.schedule.zero_stage,
        plan.schedule.recompute,
        plan.schedule.name,
        f"{plan.prediction.mfu:.1%}",
        f"{peak / 2**30:.0f}",
        f"{plan.certificate.gap:.1%}",
    )


def recommendations() -> str:
    """Models at all lengths on A100s, some on H100s, and a mixture of experts."""
    rows: list[Sequence[object]] = []
    for case in (*LLAMAS, *OTHERS):
        for seq in LENGTHS if case in LLAMAS else LENGTHS[-1:]:
            facts = case.study(seq).facts
            names = ("a100-80gb", "h100-80gb") if seq == LENGTHS[-1] else ("a100-80gb",)
            for hardware in names:
                plan = planned(facts, Cluster(hardware, nodes=case.gpus // 8), seq)
                rows.append(row(case.name, seq, plan))
    facts = source_facts(open_model(MIXTRAL), 4096)
    rows.append(row("Mixtral 8×7B", 4096, planned(facts, Cluster("a100-80gb", nodes=8), 4096)))
    head = (
        *("model", "length", "GPUs", "mb", "tp", "pp", "ep", "dp", "ZeRO", "recompute"),
        *("order", "MFU", "GiB", "gap"),
    )
    return table(head, rows)
