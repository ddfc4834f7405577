"""Why nothing fits: the fullest rank of the plan that comes closest, and what would make it fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.errors import InfeasibleError, InputError
from autopar.solver.candidates import Candidate, Pins, candidates
from autopar.solver.cuts import best_cuts
from autopar.solver.hardware import Cluster
from autopar.solver.instance import Instance
from autopar.solver.search import Search
from autopar.solver.virtual_cuts import virtual_cuts

_MOST_NODES = 4096


@dataclass(frozen=True, slots=True)
class _Closest:
    """The candidate whose fullest rank needs least."""

    candidate: Candidate
    num_bytes: int
    stage: int
    causes: dict[str, int]


def infeasible_error(instance: Instance) -> InfeasibleError:
    """The error to raise when no candidate fits."""
    search, pin = instance.search, instance.pin
    global_batch_size = instance.global_batch_size
    closest = _closest(search, instance.candidates)
    usable = search.cluster.usable_bytes
    filled = sorted(closest.causes.items(), key=lambda cause: -cause[1])[:4]
    missing = closest.num_bytes - usable
    where = f"ranks of pipeline stage {closest.stage} of {closest.candidate}"
    what = (
        f"no plan fits into {_size(usable)}: the fullest rank of the one that comes closest needs "
        f"{_size(closest.num_bytes)}, {_size(max(0, missing))} too much ("
        + ", ".join(f"{cause} {_size(num)}" for cause, num in filled)
        + ")"
    )
    helps = _relaxations(search, global_batch_size=global_batch_size, pin=pin)
    return InfeasibleError(what, where=where, hint="; or ".join(helps) or "a smaller model")


def _size(num_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit / 10:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes / 2**10:.2f} KiB"


def _closest(search: Search, tried: Sequence[Candidate]) -> _Closest:
    """Of the smallest micro-batches: larger ones need more."""
    smallest = min(candidate.micro_batch_size for candidate in tried)
    found = [
        _fullest(search, candidate) for candidate in tried if candidate.micro_batch_size == smallest
    ]
    return min(found, key=lambda closest: closest.num_bytes)


def _fullest(search: Search, candidate: Candidate) -> _Closest:
    stager = search.stager(candidate, search.setting(candidate).least)
    if candidate.virtual_stages > 1:
        cuts = min(virtual_cuts(stager), key=lambda cuts: max(stager.peak_bytes(cuts)))
    else:
        _, cuts = best_cuts(
            stager.costs.num_blocks, candidate.pp, lambda stage: stager.peak_matrix(stage)
        )
    causes = [stager.bytes_by_cause(stager.contents(stage, cuts)) for stage in range(candidate.pp)]
    sums = [sum(of_stage.values()) for of_stage in causes]
    stage = int(np.argmax(sums))
    return _Closest(candidate, sums[stage], stage, causes[stage])


def _relaxations(search: Search, *, global_batch_size: int, pin: Pins) -> list[str]:
    """Changes, each by itself, after which something fits (with the least that layouts need)."""
    found: list[str] = []
    for name in pin:
        rest = {other: value for other, value in pin.items() if other != name}
        if _fits(search, search.cluster, global_batch_size, rest):
            found.append(f"leave {name}={pin[name]} open")
    if found:
        return found
    nodes = 2 * search.cluster.nodes
    while nodes <= _MOST_NODES:
        if _fits(search, search.cluster.with_nodes(nodes), global_batch_size, pin):
            return [f"{nodes} nodes"]
        nodes *= 2
    return ["shorter sequences", "GPUs with more memory"]


def _fits(search: Search, cluster: Cluster, global_batch_size: int, pin: Pins) -> bool:
    try:
        found = candidates(
            cluster, global_batch_size=global_batch_size, model=search.divisible, pin=pin
        )
    except InputError:
        return False
    other = search
    if cluster is not search.cluster:
        other = Search(search.facts, cluster, search.sizes, search.divisible)
    smallest = min(candidate.micro_batch_size for candidate in found)
    return any(
        _can_fit(other, candidate) for candidate in found if candidate.micro_batch_size == smallest
    )


def _can_fit(search: Search, candidate: Candidate) -> bool:
    if candidate.virtual_stages > 1:  # their bound says little of memory
        return _fullest(search, candidate).num_bytes <= search.cluster.usable_bytes
    return math.isfinite(search.bound(candidate))
