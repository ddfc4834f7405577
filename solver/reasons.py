"""Why a plan and no other: what lost, by how much, and what became of every candidate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from autopar.ir.plan import critical_of, fullest_of
from autopar.ir.plan_search import FATES, Alternative, DecisionValue, SearchReport
from autopar.solver.candidates import Candidate
from autopar.solver.pins import AXES_PIN
from autopar.solver.predict import rank_predictions
from autopar.solver.search_result import SearchResult
from autopar.solver.solved import Solved

Family = tuple[int, int, int, str]
"""Candidates that are alike: pipeline and tensor degree, ZeRO stage, schedule."""

NUM_ALTERNATIVES = 5
"""So many candidates that lost are told of."""

_DERIVED = (
    *("num_micro_batches", "recomputed_blocks", "recomputed_by_op", "loss_chunks", "chunks_open"),
    *("gathered_again", "zero_stages", "zero_open", "offloaded_blocks", "placements", "depths"),
)
"""Fields of a candidate that follow from others, or are chosen with the layout."""


def alternatives(
    result: SearchResult, best: Solved, more: Sequence[Solved] = ()
) -> tuple[Alternative, ...]:
    """Candidates that lost: the fastest of each family that was simulated, ``more`` of them beside
    the search's, then families that were only bounded, then others that were simulated.
    """
    simulated = sorted(
        (solved for solved in (*result.solved, *more) if solved is not best),
        key=lambda solved: solved.step_s,
    )
    firsts: dict[Family, Solved] = {}
    for solved in simulated:
        firsts.setdefault(_family(solved.candidate), solved)
    found = [_simulated(solved) for solved in firsts.values()]
    for bound, candidate in open_families(result):
        if _family(candidate) not in firsts:
            found.append(
                Alternative(
                    description=str(candidate),
                    step_s=None,
                    bound_s=bound,
                    reason=f"proved to take at least {bound:.4g} s",
                )
            )
    found += [_simulated(solved) for solved in simulated if solved not in firsts.values()]
    return tuple(found[:NUM_ALTERNATIVES])


def _simulated(solved: Solved) -> Alternative:
    ranks = rank_predictions(solved)
    return Alternative(
        description=str(solved.candidate),
        step_s=solved.step_s,
        reason="simulated",
        seconds_by_cause=critical_of(ranks).seconds_by_cause,
        bytes_by_cause=fullest_of(ranks).bytes_by_cause,
    )


def open_families(result: SearchResult) -> list[tuple[float, Candidate]]:
    """Candidates that were bounded and not solved, lowest bound first: one of each family, and none
    of a family that was solved.
    """
    seen = {_family(solved.candidate) for solved in result.solved}
    found: list[tuple[float, Candidate]] = []
    for bound, candidate in result.open_bounds:
        if math.isfinite(bound) and _family(candidate) not in seen:
            seen.add(_family(candidate))
            found.append((bound, candidate))
    return found


def _family(candidate: Candidate) -> Family:
    return candidate.pp, candidate.tp, candidate.zero_stage, candidate.schedule


def search_report(result: SearchResult, best: Solved) -> SearchReport:
    """What became of the candidates of a search."""
    bounds = dict(result.bounds)
    fates = dict.fromkeys(FATES, 0)
    for bound, step, candidate in result.left:
        bounds[candidate] = bound
        if not math.isfinite(bound):
            fates["no_memory"] += candidate.num_members
        elif bound < best.step_s:
            fates["not_reached"] += candidate.num_members
        else:
            fates["roofline" if step <= 1 else "stages"] += candidate.num_members
    fates["no_layout"] = len(result.unsettled)
    fates["solved"] = result.num_candidates - sum(fates.values())
    return SearchReport(fates=fates, values=tuple(_values(result, best, bounds)))


def _values(
    result: SearchResult, best: Solved, bounds: dict[Candidate, float]
) -> Iterable[DecisionValue]:
    """Of each decision that has several values."""
    for field in fields(Candidate):
        if field.name in _DERIVED:
            continue
        by_value: dict[object, list[tuple[float, int]]] = {}
        for candidate, bound in bounds.items():
            for value, number in _decided(candidate, field.name).items():
                by_value.setdefault(value, []).append((bound, number))
        if len(by_value) == 1:
            continue
        for value in sorted(by_value, key=_order):
            steps = [s.step_s for s in result.solved if getattr(s.candidate, field.name) == value]
            bound = min(bound for bound, _ in by_value[value])
            yield DecisionValue(
                decision=field.name,
                value=_text(field.name, value),
                num_candidates=sum(number for _, number in by_value[value]),
                bound_s=bound if math.isfinite(bound) else None,
                step_s=min(steps, default=None),
                chosen=getattr(best.candidate, field.name) == value,
            )


def _decided(candidate: Candidate, name: str) -> Mapping[object, int]:
    """The values that a decision may have in a candidate, and how many candidates that it stands
    for have each.
    """
    if name == "zero_stage" and candidate.zero_open:
        return dict.fromkeys(range(1, candidate.zero_stage + 1), candidate.num_members)
    if candidate.stands_for_several:
        return Counter(getattr(own, name) for own in candidate.members())
    return {getattr(candidate, name): candidate.num_members}


def _text(name: str, value: object) -> str:
    return ",".join(value) if name == AXES_PIN and isinstance(value, tuple) else str(value)


def _order(value: object) -> tuple[int, int, str]:
    """Numbers by size, and before what is no number."""
    return (0, value, "") if isinstance(value, int) else (1, 0, str(value))
