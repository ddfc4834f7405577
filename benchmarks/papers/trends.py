"""Other GPUs and hardware to come: the best layouts where parts of a machine get faster apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.api.plots import Points
from autopar.solver import Cluster
from benchmarks.papers.cases import Case
from benchmarks.papers.pages import table
from benchmarks.papers.sweep import Space, Sweep, length

FACTORS = (1, 2, 4, 8)
MESHES = Space(
    micro_batch_size=(1, 2),
    recompute=("none", "full"),
    sequence_parallel=(True,),
    zero_stage=(1,),
)

VARIANTS: Mapping[str, Mapping[str, float]] = {
    "as it is": {},
    "compute × 2": {"compute": 2},
    "compute × 4": {"compute": 4},
    "memory × 2": {"memory": 2},
    "memory × 4": {"memory": 4},
    "NVLink × 2": {"node": 2},
    "network × 4": {"network": 4},
    "network / 4": {"network": 1 / 4},
    "network / 16": {"network": 1 / 16},
    "compute × 4, all else × 2": {"compute": 4, "memory": 2, "node": 2, "network": 2},
    "all × 4": {"compute": 4, "memory": 4, "node": 4, "network": 4},
}


def trend(case: Case, seq: int, space: Space, **factors: float) -> Sweep:
    """A sweep on A100 nodes of which parts are so many times faster."""
    cluster = Cluster("a100-80gb", nodes=case.gpus // 8).scaled(**factors)
    return case.sweep(seq, space, cluster=cluster)


def trend_table(case: Case, seq: int) -> str:
    """The best layout of each variant, and its speed beside that of today."""
    rows: list[Sequence[object]] = []
    today: Sweep | None = None
    for name, factors in VARIANTS.items():
        of = trend(case, seq, MESHES, **factors)
        today = today or of
        layout, causes = of.best.layout, of.best.causes()
        rows.append(
            (
                name,
                layout.micro_batch_size,
                layout.tp,
                layout.pp,
                f"{of.best.seconds:.1f}",
                f"{today.best.seconds / of.best.seconds:.2f}",
                f"{of.best.mfu:.0%}",
                f"{causes['communication in layers'] / of.best.seconds:.0%}",
                f"{causes['exposed data-parallel communication'] / of.best.seconds:.0%}",
            )
        )
    head = (
        *(f"{case.name}, {length(seq)}", "mb", "tp", "pp", "step s", "speed", "MFU"),
        *("in layers", "exposed"),
    )
    return table(head, rows)


def trend_lines(case: Case, seq: int) -> Mapping[str, Points]:
    """How many times faster the best step is, by the factor of each part by itself."""
    today = trend(case, seq, MESHES).best.seconds
    found: dict[str, Points] = {}
    for part in ("compute", "memory", "node", "network"):
        name = {"node": "NVLink", "memory": "HBM bandwidth"}.get(part, part)
        found[name] = [
            (factor, today / trend(case, seq, MESHES, **{part: factor}).best.seconds)
            for factor in FACTORS
        ]
    together = [
        trend(case, seq, MESHES, compute=n, memory=n, node=n, network=n).best.seconds
        for n in FACTORS
    ]
    found["all"] = [(n, today / seconds) for n, seconds in zip(FACTORS, together, strict=True)]
    return found
