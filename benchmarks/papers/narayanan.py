"""Tensor or pipeline parallelism: why Hagemann et al. and Narayanan et al. (2021) disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.estimation import ModelShape
from autopar.ir.plan import RecomputeName
from autopar.solver import Cluster
from benchmarks.papers.cases import GPT_162B
from benchmarks.papers.pages import table
from benchmarks.papers.study import FUSED, Found, Layout, Study, shape_facts
from benchmarks.papers.sweep import Sweep

MESHES = ((32, 2), (16, 4), (8, 8), (4, 16), (2, 32))
"""(tp, pp) on 64 GPUs."""

MEGATRON = "fused_causal_softmax + fused pointwise"
BATCHES = (32, 128, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is recomputed, and by which kernels."""

    recompute: RecomputeName
    kernel: str


SETTINGS: Mapping[str, Setting] = {
    "theirs": Setting(recompute="full", kernel=MEGATRON),
    "FlashAttention 2": Setting(recompute="full", kernel=FUSED),
    "and nothing recomputed": Setting(recompute="none", kernel=FUSED),
}


def side_by_side(of: Sweep, degree: int) -> Mapping[str, Found]:
    """The best tensor-parallel and the best pipeline-parallel layout of ``degree``, at ZeRO 1 and
    micro-batch 1 without recomputation; whether or not they fit.
    """
    chosen: dict[str, Found] = {}
    for name, tp, pp in ((f"tp {degree}", degree, 1), (f"pp {degree}", 1, degree)):
        found = [
            f
            for f in of.found
            if (f.layout.tp, f.layout.pp, f.layout.micro_batch_size) == (tp, pp, 1)
            and (f.layout.zero_stage, f.layout.recompute) == (1, "none")
        ]
        chosen[name] = min(found, key=lambda f: f.seconds)
    return chosen


def causes_table(chosen: Mapping[str, Found]) -> str:
    """Seconds by cause of the stage that waits least, a column for each layout."""
    causes = {name: found.causes() for name, found in chosen.items()}
    rows: list[Sequence[object]] = [
        (cause, *(f"{of.get(cause, 0.0):.2f}" for of in causes.values()))
        for cause in next(iter(causes.values()))
        if any(of.get(cause, 0.0) >= 0.005 for of in causes.values())
    ]
    rows.append(("**step**", *(f"**{found.seconds:.2f}**" for found in chosen.values())))
    rows.append(("GiB", *(f"{found.gib:.0f}" for found in chosen.values())))
    return table(("seconds", *chosen), rows)


def meshes_of(study: Study, setting: Setting) -> Mapping[tuple[int, int], Found]:
    """The meshes of Narayanan et al., figure 13, whether or not they fit."""
    return {
        (tp, pp): study(
            Layout(tp=tp, pp=pp, dp=1, recompute=setting.recompute, kernel=setting.kernel)
        )
        for tp, pp in MESHES
    }


def mesh_table(shape: ModelShape = GPT_162B) -> str:
    """MFU of each mesh, by batch, in their setting and in that of Hagemann et al."""
    rows: list[Sequence[object]] = []
    cluster = Cluster("a100-80gb", nodes=8)
    for name, setting in SETTINGS.items():
        for batch in BATCHES:
            study = Study(shape_facts(shape), cluster, global_batch_size=batch)
            found = meshes_of(study, setting)
            best = max(of.mfu for of in found.values())
            cells = [
                f"**{of.mfu:.1%}**" if of.mfu == best else f"{of.mfu:.1%}" for of in found.values()
            ]
            rows.append((name, batch, *cells))
    return table(("setting", "batch", *(f"tp {tp} × pp {pp}" for tp, pp in MESHES)), rows)
