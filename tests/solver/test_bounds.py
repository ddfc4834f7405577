"""No choice of layout, cuts and recomputed blocks that fits is faster than what is proved."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest

from autopar.solver import Cluster
from autopar.solver.candidates import Candidate
from autopar.solver.costs.memory import itemsizes
from autopar.solver.instance import Instance, divisible
from autopar.solver.layout.model_facts import model_facts
from autopar.solver.search import Search
from autopar.solver.settings import Setting
from autopar.solver.solved import Solved, simulate_cuts
from tests.solver.graphs import block_model
from tests.solver.small import FOUR, TRAINING, instance

DEEP = block_model([("linear", 0), ("relu", 0), ("linear", 0), ("add", 0)], num_blocks=3)


def made(cluster: Cluster) -> Instance:
    """An instance of three blocks with eight sequences."""
    facts = model_facts(DEEP)
    search = Search(facts, cluster, itemsizes(TRAINING), divisible(facts, None))
    like = instance(cluster, {"virtual_stages": 1})
    return dataclasses.replace(like, facts=facts, search=search)


def layouts(setting: Setting) -> Iterator[object]:
    """The fastest layouts, and some that keep less."""
    yield setting.solution("none")
    yield setting.solution("full")
    for price in setting.prices():
        for factor in (0.5, 1.0, 2.0, 8.0):
            yield setting.priced_solution(factor * price)


def choices(made: Instance, candidate: Candidate) -> Iterator[Solved]:
    """All cuts and all sets of recomputed blocks of some layouts that fit into memory."""
    setting, num = made.search.setting(candidate), len(DEEP.blocks)
    for solution in dict.fromkeys(layouts(setting)):
        stager = made.search.layout_stager(candidate, setting, solution)  # type: ignore[arg-type]
        for inner in itertools.combinations(range(1, num), candidate.pp - 1):
            cuts = (0, *inner, num)
            for size in range(num):
                for blocks in itertools.combinations(range(num - 1), size):
                    chosen = dataclasses.replace(
                        candidate,
                        recompute="blocks" if blocks else "none",
                        recomputed_blocks=blocks,
                    )
                    own = dataclasses.replace(stager, candidate=chosen)
                    if max(own.peak_bytes(cuts)) <= made.cluster.usable_bytes:
                        yield simulate_cuts(chosen, setting, solution, own, cuts)  # type: ignore[arg-type]


@pytest.mark.parametrize("usable_bytes", [11_000, 13_000, 16_000, 20_000, 2**31])
def test_nothing_that_fits_is_faster_than_its_bounds(usable_bytes: int) -> None:
    own = made(FOUR.with_memory(usable_bytes))
    fitting = 0
    for candidate in own.candidates:
        if candidate.num_micro_batches == 4:  # as 2 and 8
            continue
        bounds = (
            own.search.rough_bound(candidate),
            own.search.scalar_bound(candidate),
            own.search.bound(candidate),
            own.search.layout_bound(candidate),
        )
        for solved in choices(own, candidate):
            fitting += 1
            for bound in bounds:
                assert bound <= solved.step_s * (1 + 1e-9), str(solved.candidate)
    assert fitting > 0 or usable_bytes < 13_000
