"""Search with what fits: where nothing does, with offloading that nobody has pinned.

Offloading is of use where memory binds, and searching it beside all else takes half as long again.
So it is off unless it is pinned or left open by name, and tried where the plan would be an error:
optimizer state first, whose copies come once a step, then activations, too, of all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.ir.errors import InputError
from autopar.solver.candidates import Candidate
from autopar.solver.instance import Instance
from autopar.solver.pins import Pins
from autopar.solver.relaxations import may_fit
from autopar.solver.search_result import SearchResult
from autopar.solver.side_by_side import run_side_by_side


def run_instance(
    instance: Instance,
    *,
    first: Sequence[Candidate] = (),
    cutoff_s: float = math.inf,
    stop_at_s: float = math.inf,
) -> tuple[Instance, SearchResult]:
    """``run_side_by_side`` on an instance; where nothing fits, also on candidates that offload. It
    comes with the instance of all that were searched, under the same pins.
    """
    result = run_side_by_side(
        instance.search, instance.candidates, first=first, cutoff_s=cutoff_s, stop_at_s=stop_at_s
    )
    if result.best is not None or math.isfinite(cutoff_s):
        return instance, result
    searched = instance
    for pin in _offloading(instance):
        try:
            other = instance.on(instance.cluster, pin=pin)
        except InputError:  # it does not go with other pins
            continue
        if not may_fit(other):
            continue
        instance.search.progress("nothing fits: offloading")
        found = run_side_by_side(other.search, other.candidates, stop_at_s=stop_at_s)
        result = result.joined(found)
        searched = replace(searched, candidates=(*searched.candidates, *other.candidates))
        if result.best is not None:
            break
    return searched, result


def _offloading(instance: Instance) -> Iterator[Pins]:
    """The pins with more offloading, step by step."""
    pin, most = dict(instance.pin), len(instance.facts.model.blocks)
    for name, value in (("offload_optimizer", 1), ("offload_activations", most)):
        if name not in pin:
            pin = {**pin, name: value}
            yield pin
