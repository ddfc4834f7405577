"""Why nothing fits: the fullest rank of the plan that comes closest, and what would make it fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.errors import InfeasibleError
from autopar.solver.candidates import Candidate
from autopar.solver.instance import Instance
from autopar.solver.pricer import Pricer
from autopar.solver.relaxations import relaxations
from autopar.solver.virtual_cuts import virtual_cuts
from autopar.solver.windows import all_windows

_UNVERIFIED = ("shorter sequences", "GPUs with more memory", "a smaller model")
"""What helps where no change was found that does."""


@dataclass(frozen=True, slots=True)
class _Closest:
    """The candidate whose fullest rank has least too much.

    Attributes:
        nodes: The kind of nodes that the rank is on.
    """

    candidate: Candidate
    num_bytes: int
    usable_bytes: int
    stage: int
    nodes: str
    causes: dict[str, int]

    @property
    def missing_bytes(self) -> int:
        return self.num_bytes - self.usable_bytes


def infeasible_error(instance: Instance) -> InfeasibleError:
    """The error to raise when no candidate fits."""
    pricer = instance.search.pricer
    closest = _closest(pricer, instance.candidates)
    usable = closest.usable_bytes
    filled = sorted(closest.causes.items(), key=lambda cause: -cause[1])[:4]
    missing = closest.missing_bytes
    on = f" on {closest.nodes}" if pricer.cluster.is_mixed else ""
    where = f"ranks of pipeline stage {closest.stage}{on} of {closest.candidate}"
    what = (
        f"no plan fits into {_size(usable)}: the fullest rank of the one that comes closest needs "
        f"{_size(closest.num_bytes)}, {_size(missing)} too much"
        if missing > 0
        else f"no plan was found that fits into {_size(usable)}: {_size(closest.num_bytes)} is the "
        "least that the fullest rank of the one that comes closest can need, and no layout with so "
        "little was found"
    )
    what += " (" + ", ".join(f"{cause} {_size(num)}" for cause, num in filled) + ")"
    found = relaxations(instance)
    if found.conflict:
        what += f"; pinned {' and '.join(found.conflict)} leave{'s' * (len(found.conflict) == 1)} "
        what += "no way to fit"
    helps = [str(change) for change in found.changes] or list(_UNVERIFIED)
    return InfeasibleError(what, where=where, hint="; or ".join(helps))


def _size(num_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit / 10:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes / 2**10:.2f} KiB"


def _closest(pricer: Pricer, tried: Sequence[Candidate]) -> _Closest:
    """Of the smallest micro-batches: larger ones need more."""
    smallest = min(candidate.micro_batch_size for candidate in tried)
    found = [
        _fullest(pricer, candidate) for candidate in tried if candidate.micro_batch_size == smallest
    ]
    return min(found, key=lambda closest: closest.missing_bytes)


def _fullest(pricer: Pricer, candidate: Candidate) -> _Closest:
    candidate = candidate.members()[0]  # split over most ranks
    if candidate.recompute == "blocks":  # all of them need least
        candidate = replace(candidate, recompute="full")
    stager = pricer.stager(candidate, pricer.setting(candidate).least)
    if candidate.virtual_stages > 1:
        cuts = min(virtual_cuts(stager), key=stager.most_missing)
    else:
        windows = all_windows(stager.costs.num_blocks, candidate.pp)
        assert windows is not None, "a candidate has no more stages than blocks"
        needed = stager.run_peaks(windows.runs)
        _, cuts = windows.least_largest(needed - stager.sites.usable_bytes[windows.runs.stage])
    causes = [stager.bytes_by_cause(stage, cuts) for stage in range(candidate.pp)]
    sums = np.array([sum(of_stage.values()) for of_stage in causes])
    stage = int(np.argmax(sums - stager.sites.usable_bytes))
    return _Closest(
        candidate=candidate,
        num_bytes=int(sums[stage]),
        usable_bytes=int(stager.sites.usable_bytes[stage]),
        stage=stage,
        nodes=stager.sites.names(stage),
        causes=causes[stage],
    )
