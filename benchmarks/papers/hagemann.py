"""Hagemann et al. 2023, *Efficient Parallelization Layouts for Large-Scale Distributed Model
Training*: their sweep of layouts, wider, through the planner's cost model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from autopar.api.plots import lines, stacked
from benchmarks.papers import layout_tables as tables
from benchmarks.papers import narayanan
from benchmarks.papers.cases import LENGTHS, LLAMAS, PUBLISHED_MFU
from benchmarks.papers.pages import Finding, findings
from benchmarks.papers.study import WAITING, Found
from benchmarks.papers.sweep import PAPER, SHARDED, Sweep, length, times

DEGREE = 4
"""Of the layouts that are looked at side by side: tensor or pipeline."""


def where(sweeps: Sequence[Sweep], holds: Callable[[Sweep], bool]) -> str:
    """In words: where something holds."""
    places = [of.where for of in sweeps if holds(of)]
    if not places:
        return "nowhere"
    return "everywhere" if len(places) == len(sweeps) else "for " + "; ".join(places)


def what_holds(sweeps: Sequence[Sweep]) -> Sequence[Finding]:
    """The paper's recommendations, judged by layouts that it has (ZeRO 1, all or nothing
    recomputed) at the lengths that it has.
    """
    theirs = [
        Sweep(
            model=of.model,
            seq=of.seq,
            study=of.study,
            found=[found for found in of.found if tables.is_paper(found.layout)],
        )
        for of in sweeps
        if (of.model, of.seq) in PUBLISHED_MFU
    ]
    return (
        *_micro_batch_and_recompute(theirs),
        *_tensor_and_pipeline(theirs),
        *_sequence_parallel(sweeps),
        *_kernels_and_mfu(theirs),
    )


def _micro_batch_and_recompute(sweeps: Sequence[Sweep]) -> Sequence[Finding]:
    one = [of.best.layout.micro_batch_size == 1 for of in sweeps]
    kept = [of.best.layout.recompute == "none" for of in sweeps]
    price = [of.price(lambda layout: layout.micro_batch_size == 1) or 0.0 for of in sweeps]
    full = [of.price(lambda layout: layout.recompute == "full") for of in sweeps]
    return (
        Finding(
            paper="a micro-batch of 1 sequence is most efficient",
            ours=f"it is best {where(sweeps, lambda of: of.best.layout.micro_batch_size == 1)}, "
            f"and nowhere costs more than {max(price) - 1:.1%} over the best",
            agrees=all(one),
        ),
        Finding(
            paper="no activation checkpointing where it fits",
            ours=f"the best layout recomputes nothing "
            f"{where(sweeps, lambda of: of.best.layout.recompute == 'none')}; recomputing all "
            f"takes {' to '.join(_ends(full))} times as long",
            agrees=all(kept),
        ),
    )


def _ends(ratios: Sequence[float | None]) -> tuple[str, ...]:
    found = [ratio for ratio in ratios if ratio is not None]
    return tuple(dict.fromkeys(times(end) for end in (min(found), max(found)))) if found else ("–",)


def _tensor_and_pipeline(sweeps: Sequence[Sweep]) -> Sequence[Finding]:
    def prefers(of: Sweep) -> bool:
        return of.best.layout.pp >= of.best.layout.tp

    only = [of.ratio(lambda layout: layout.tp == 1, lambda layout: layout.pp == 1) for of in sweeps]
    return (
        Finding(
            paper="prefer pipeline over tensor parallelism",
            ours=f"the best layout has pp ≥ tp {where(sweeps, prefers)}; where both fit, the best "
            f"without pipeline takes {' to '.join(_ends(only))} times as long as the best without "
            "tensor parallelism",
            agrees=all(prefers(of) for of in sweeps),
        ),
    )


def _sequence_parallel(sweeps: Sequence[Sweep]) -> Sequence[Finding]:
    gains = {of.where: tables.best_gain(of) for of in sweeps}
    small, *others = [(name, gain) for name, gain in gains.items() if gain is not None]
    said = ", ".join(f"{name} {gain:.2f}" for name, gain in (small, *others))
    return (
        Finding(
            paper="sequence parallelism pays beyond 30B parameters and 2k tokens: it leaves room "
            "for layouts without recomputation",
            ours=f"the best step without it, over the best: {said}",
            agrees=small[1] < 1.01 and all(gain > 1.0 for _, gain in others),
        ),
    )


def _kernels_and_mfu(sweeps: Sequence[Sweep]) -> Sequence[Finding]:
    first = sweeps[0]
    seconds = tables.kernel_seconds(first)
    fused = seconds["and fused norm"]
    published = PUBLISHED_MFU[first.model, first.seq]
    return (
        Finding(
            paper="FlashAttention 2 with a fused RMSNorm is fastest",
            ours=f"{first.where}: unfused norms take {seconds['FlashAttention 2'] / fused:.2f} "
            f"times as long, FlashAttention 1 {seconds['FlashAttention 1'] / fused:.2f}, eager "
            f"attention {seconds['eager'] / fused:.2f}",
            agrees=min(seconds.values()) == fused,
        ),
        Finding(
            paper=f"{published:.1%} MFU of {first.model} on {first.study.cluster.num_gpus} GPUs",
            ours=f"{first.best.mfu:.1%}",
            agrees=abs(first.best.mfu / published - 1) < 0.05,
        ),
    )


def same_pick(sweeps: Sequence[Sweep]) -> Mapping[str, list[tuple[float, float]]]:
    """MFU of the best layouts by length in thousands of tokens, ours and the paper's."""
    found: dict[str, list[tuple[float, float]]] = {}
    for of in sweeps:
        found.setdefault(of.model, []).append((of.seq / 1024, 100 * of.best.mfu))
    for (model, seq), mfu in PUBLISHED_MFU.items():
        found.setdefault(f"{model}, paper", []).append((seq / 1024, 100 * mfu))
    return found


def bar(found: Found) -> dict[str, float]:
    """Seconds by cause, as a bar: waiting is last."""
    causes = found.causes()
    return {
        **{cause: s for cause, s in causes.items() if cause != WAITING},
        WAITING: causes[WAITING],
    }


def main() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Parts and plots of the page."""
    sweeps: list[Sweep] = []
    for case in LLAMAS:
        for seq in LENGTHS:
            sweeps.append(case.sweep(seq, PAPER, SHARDED))
            print(f"{sweeps[-1].where}: {len(sweeps[-1].found)} layouts", file=sys.stderr)
    by_name = {of.where: of for of in sweeps}
    middle = narayanan.side_by_side(by_name["Llama 30B, 2k"], DEGREE)
    parts = {
        "findings": findings(what_holds(sweeps)),
        "best": tables.best_table(sweeps, tables.is_paper),
        "best-of-all": tables.best_table(sweeps),
        "prices": tables.price_table(sweeps),
        "causes": narayanan.causes_table(middle),
        "narayanan": narayanan.mesh_table(),
        "sequence-parallel": tables.sequence_parallel_table(sweeps),
        "kernels": tables.kernel_table(sweeps),
    }
    plots = {
        "hagemann-mfu": lines("MFU of the best layout", "thousand tokens", "%", same_pick(sweeps)),
        "hagemann-causes": stacked(
            f"A step of Llama 30B at {length(2048)} by cause",
            "seconds",
            {name: bar(found) for name, found in middle.items()},
        ),
    }
    return parts, plots
