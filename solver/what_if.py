"""What-if: the same search on clusters with one change, and runners-up that are only bounded."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.plan_search import WhatIf
from autopar.solver.hardware import Cluster
from autopar.solver.instance import Instance
from autopar.solver.reasons import open_families
from autopar.solver.search_result import SearchResult
from autopar.solver.solved import Solved

_GIB = 2**30


def shadow_prices(instance: Instance, best: Solved) -> tuple[WhatIf, ...]:
    """The best step after each change of the cluster; each is a search of its own."""
    found: list[WhatIf] = []
    for change, cluster in _changes(instance.cluster):
        instance.search.progress(f"what if: {change}")
        other = instance.on(cluster)
        result = other.search.run(other.candidates)
        if result.best is None:  # nobody has less than before
            continue
        # The best of before is still possible, and no slower: a search that stopped at its limit
        # may have missed it.
        kept = other.search.refiner.solve(best.candidate)
        step_s, candidate = result.best.step_s, result.best.candidate
        if kept is not None and kept.step_s < step_s:
            step_s, candidate = kept.step_s, kept.candidate
        found.append(
            WhatIf(
                change=change,
                step_s=step_s,
                bound_s=min(result.bound_s, step_s),
                description=str(candidate),
                same_decisions=candidate == best.candidate,
            )
        )
    return tuple(found)


def _changes(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    yield "1 GiB more per GPU", cluster.with_more_memory(_GIB)
    if cluster.nodes > 1:
        yield "twice the network between nodes", cluster.scaled(network=2)
    if cluster.gpus_per_node > 1:
        yield "twice the links inside nodes", cluster.scaled(node=2)


def solve_runners_up(instance: Instance, result: SearchResult, num: int) -> list[Solved]:
    """Of the families that were only bounded, the ``num`` with the lowest bounds, solved."""
    found: list[Solved] = []
    for _, candidate in open_families(result)[:num]:
        instance.search.progress(f"what if: {candidate}")
        solved = instance.search.refiner.solve(candidate)
        if solved is not None:
            found.append(solved)
    return found
