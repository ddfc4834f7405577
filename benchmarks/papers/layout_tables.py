"""Tables of sweeps: the best layouts, and what it costs to decide otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.papers.cases import PUBLISHED_MFU
from benchmarks.papers.pages import table
from benchmarks.papers.study import FLASH, FUSED, Layout
from benchmarks.papers.sweep import Choose, Sweep, length, times

KERNELS: Mapping[str, str] = {
    "eager": "eager",
    "fused softmax": "fused_softmax",
    "FlashAttention 1": "flash_attention1",
    "FlashAttention 2": FLASH,
    "and fused norm": FUSED,
}


def is_paper(layout: Layout) -> bool:
    """Whether Hagemann et al. have such runs: ZeRO 1, all or nothing recomputed."""
    return layout.zero_stage == 1 and layout.recompute in ("none", "full")


PRICES: Mapping[str, Choose] = {
    "mb 2": lambda layout: layout.micro_batch_size == 2,
    "mb 4": lambda layout: layout.micro_batch_size == 4,
    "selective": lambda layout: layout.recompute == "selective",
    "full": lambda layout: layout.recompute == "full",
    "tp 1": lambda layout: layout.tp == 1,
    "pp 1": lambda layout: layout.pp == 1,
    "ZeRO 1": lambda layout: layout.zero_stage == 1,
    "ZeRO 2": lambda layout: layout.zero_stage == 2,
    "ZeRO 3": lambda layout: layout.zero_stage == 3,
}
"""Decisions that a table prices; each beside the best of all."""


def best_table(
    sweeps: Sequence[Sweep], choose: Choose = lambda _: True, *, published: bool = True
) -> str:
    """The best layout of each sweep; ``published``: beside the paper's MFU, which is of A100s."""
    rows: list[Sequence[object]] = []
    for of in sweeps:
        found = of.fastest(choose)
        if found is None:
            rows.append((of.model, length(of.seq), of.study.cluster.num_gpus, "nothing fits"))
            continue
        layout = found.layout
        paper = PUBLISHED_MFU.get((of.model, of.seq)) if published else None
        rows.append(
            (
                of.model,
                length(of.seq),
                layout.num_gpus,
                layout.micro_batch_size,
                layout.tp,
                layout.pp,
                layout.recompute,
                "yes" if layout.sequence_parallel else "no",
                layout.zero_stage,
                f"{found.seconds:.1f}",
                f"{found.gib:.0f}",
                f"{found.mfu:.1%}",
                f"{paper:.1%}" if paper else "–",
            )
        )
    head = (
        *("model", "length", "GPUs", "mb", "tp", "pp", "recompute", "SP", "ZeRO"),
        *("step s", "GiB", "MFU", "paper"),
    )
    return table(head, rows)


def price_table(sweeps: Sequence[Sweep]) -> str:
    """The fastest step with each decision over the fastest of all."""
    rows = [
        (of.model, length(of.seq), *(times(of.price(choose)) for choose in PRICES.values()))
        for of in sweeps
    ]
    return table(("model", "length", *PRICES), rows)


def sequence_parallel_gain(of: Sweep, tp: int) -> float | None:
    """The fastest step without sequence parallelism over the fastest with it, at a tensor degree
    and at micro-batch 1, ZeRO 1 and no recomputation; whether or not it fits.
    """
    found = {
        sharded: min(
            f.seconds
            for f in of.found
            if f.layout.tp == tp
            and f.layout.pp == 1
            and f.layout.sequence_parallel == sharded
            and f.layout.micro_batch_size == 1
            and f.layout.zero_stage == 1
            and f.layout.recompute == "none"
        )
        for sharded in (False, True)
    }
    return found[False] / found[True]


def sequence_parallel_table(sweeps: Sequence[Sweep]) -> str:
    """What sequence parallelism gains: at a tensor degree, and for the best layout."""
    rows = [
        (
            of.model,
            length(of.seq),
            *(times(sequence_parallel_gain(of, tp)) for tp in (2, 4, 8)),
            times(best_gain(of)),
        )
        for of in sweeps
    ]
    return table(("model", "length", "tp 2", "tp 4", "tp 8", "best layouts"), rows)


def best_gain(of: Sweep) -> float | None:
    """The fastest layout that shares positions nowhere over the fastest of all, in ZeRO 1."""
    return of.ratio(
        lambda layout: layout.zero_stage == 1,
        lambda layout: layout.zero_stage == 1 and not layout.sequence_parallel,
    )


def kernel_seconds(of: Sweep) -> Mapping[str, float]:
    """Step of the best layout under each kernel, whether or not it fits."""
    best = of.best.layout
    return {
        name: of.study(replace(best, kernel=kernel)).seconds for name, kernel in KERNELS.items()
    }


def kernel_table(sweeps: Sequence[Sweep]) -> str:
    """Steps under each kernel over that of FlashAttention 2 with fused norms."""
    rows = []
    for of in sweeps:
        seconds = kernel_seconds(of)
        fastest = seconds["and fused norm"]
        rows.append(
            (of.model, length(of.seq), *(times(value / fastest) for value in seconds.values()))
        )
    return table(("model", "length", *KERNELS), rows)
