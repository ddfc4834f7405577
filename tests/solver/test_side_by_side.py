"""Two searches side by side find what one finds, whichever of them fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from autopar.solver import search, side_by_side
from autopar.solver.candidates import Candidate
from autopar.solver.search_result import SearchResult
from autopar.solver.side_by_side import _Peer, _Told, run_side_by_side
from tests.solver.small import FOUR, TWO_NODES, instance
from tests.solver.test_unequal_shares import MIXED

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "_FEW", 0)
    monkeypatch.setattr(side_by_side, "_may_fork", lambda: True)


def both(cluster, batch=8) -> tuple[SearchResult, SearchResult]:
    one, two = instance(cluster, batch=batch), instance(cluster, batch=batch)
    return one.search.run(one.candidates), run_side_by_side(two.search, two.candidates)


@pytest.mark.parametrize("cluster", [FOUR, TWO_NODES, FOUR.with_memory(24_000)])
def test_two_searches_find_the_step_of_one_with_a_bound_on_all(cluster):
    alone, together = both(cluster)
    assert alone.best is not None
    assert together.best is not None
    assert together.best.step_s == pytest.approx(alone.best.step_s, rel=1e-12)
    assert together.bound_s <= alone.best.step_s
    tried = _members(together)
    assert len(tried) == together.num_candidates == alone.num_candidates
    assert tried == _members(alone)


def _members(result: SearchResult) -> set[Candidate]:
    found = {*result.bounds, *(candidate for _, _, candidate in result.left)}
    return {own for candidate in found for own in candidate.members()}


@pytest.mark.parametrize("cluster", [TWO_NODES, MIXED])
def test_what_the_fork_solved_is_the_same_here(cluster):
    made = instance(cluster, batch=16)
    found = run_side_by_side(made.search, made.candidates)
    for solved in found.solved:
        again = made.search.refiner.made_again(solved.candidate, solved.solution, solved.cuts)
        assert again.step_s == solved.step_s
        assert again.stager.peak_bytes(again.cuts) == solved.stager.peak_bytes(solved.cuts)
        assert len(again.beside) == len(solved.beside)


def test_the_same_is_found_each_time():
    first, second = both(TWO_NODES)[1], both(TWO_NODES)[1]
    assert first.bounds == second.bounds
    assert [s.candidate for s in first.solved] == [s.candidate for s in second.solved]
    assert first.bound_s == second.bound_s


def test_a_fork_that_dies_loses_nothing(monkeypatch, caplog):
    parent = os.getpid()
    made = instance(FOUR)
    honest = made.search.refiner.scalar

    def dies(candidate, enough_s):
        if os.getpid() != parent:
            os._exit(1)
        return honest(candidate, enough_s)

    monkeypatch.setattr(made.search.refiner, "scalar", dies)
    found = run_side_by_side(made.search, made.candidates)
    other = instance(FOUR)
    alone = other.search.run(other.candidates)
    assert "searched here" in caplog.text
    assert found.best is not None
    assert alone.best is not None
    assert found.best.step_s == pytest.approx(alone.best.step_s, rel=1e-12)
    assert found.num_candidates == sum(own.num_members for own in made.candidates)


def test_what_a_fork_told_before_it_ended_is_read():
    here, there = multiprocessing.Pipe()
    rest = SearchResult(best=None, bound_s=2.0, solved=[], bounds={}, num_candidates=3)
    _Peer(there).finish(_Told(decisions=[], best=None, rest=rest))
    there.close()
    told = _Peer(here).wait()
    assert told is not None
    assert (told.rest.bound_s, told.rest.num_candidates) == (2.0, 3)


def test_a_fork_that_told_nothing_is_not_waited_for():
    here, there = multiprocessing.Pipe()
    there.close()
    assert _Peer(here).wait() is None


def test_where_nothing_fits_nothing_is_found():
    _, together = both(FOUR.with_memory(200))
    assert together.best is None


def test_the_fork_ends_when_the_process_that_waits_for_it_is_killed(monkeypatch):
    """As by a scheduler, without a chance to end what it started."""
    monkeypatch.setattr(search, "_MEETING", 1)
    made = instance(TWO_NODES, batch=16)
    rough, scalar = made.search.refiner.rough, made.search.refiner.scalar
    here, there = multiprocessing.Pipe()

    def searches() -> None:
        here.close()
        killed = os.getpid()

        def bound(candidate, enough_s):
            if os.getpid() == killed:
                os.kill(killed, signal.SIGKILL)
            time.sleep(0.4)  # half of the candidates take most of a minute
            return scalar(candidate, enough_s)

        monkeypatch.setattr(made.search.refiner, "rough", lambda c: min(rough(c), 1.0))
        monkeypatch.setattr(made.search.refiner, "scalar", bound)
        run_side_by_side(made.search, made.candidates)

    assert len(made.candidates) > 200
    process = multiprocessing.get_context("fork").Process(target=searches)
    process.start()
    there.close()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert here.poll(10)  # the end of the last process that has the other end
    with pytest.raises(EOFError):
        here.recv()
