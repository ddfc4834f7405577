"""Two searches side by side: this process and a fork of it have half of the settings each.

After every so many steps both wait for each other and tell the shortest step that they know, so
that what is found does not depend on which of them is faster. The fork tells what it solved by its
decisions, from which it is made again here.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from autopar.solver.candidates import Candidate
from autopar.solver.layout.problem import Solution
from autopar.solver.search import Search, SearchResult
from autopar.solver.solved import Solved

_FEW = 2000
"""So many candidates are searched before a fork would pay."""

_log = logging.getLogger(__name__)


def run_side_by_side(
    search: Search,
    candidates: Sequence[Candidate],
    *,
    first: Sequence[Candidate] = (),
    cutoff_s: float = math.inf,
    stop_at_s: float = math.inf,
) -> SearchResult:
    """``search.run`` on two cores, where there are two and it is worth it; for the arguments see
    there.

    Work limits are those of each half. Where plans tie it may be another one than ``search.run``
    finds.
    """
    halves = _halves(search, candidates) if _may_fork() and len(candidates) >= _FEW else None
    if halves is None:
        return search.run(candidates, first=first, cutoff_s=cutoff_s, stop_at_s=stop_at_s)
    own, others = halves
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def run_half(half: Sequence[Candidate], meet: Callable[[float], float]) -> SearchResult:
        own_first = [candidate for candidate in first if candidate in half]
        return search.run(half, first=own_first, cutoff_s=cutoff_s, stop_at_s=stop_at_s, meet=meet)

    def fork() -> None:
        here.close()
        search.progress = lambda _: None  # the terminal is the other one's
        peer = _Peer(there)

        def meet(best_s: float) -> float:
            known_s = peer.meet(best_s)
            if peer.is_lost:  # killed: nobody wants a result
                os._exit(1)
            return known_s

        try:
            result = run_half(others, meet)
        except KeyboardInterrupt:  # the other one has it, too
            return
        peer.finish(_told(result))

    process = context.Process(target=fork, daemon=True)
    process.start()
    there.close()
    peer = _Peer(here)
    try:
        result = run_half(own, peer.meet)
        told = peer.wait()
    finally:
        process.kill()
        process.join()
        here.close()
    if told is None:
        _log.warning("the second search ended without a result; its half is searched here")
        best_s = math.inf if result.best is None else result.best.step_s
        rest = search.run(others, cutoff_s=min(cutoff_s, best_s), stop_at_s=stop_at_s)
        return _joined(result, rest)
    return _joined(result, _made_again(search, told))


def _may_fork() -> bool:
    """Whether there is a second core, and a process that may use it."""
    if not sys.platform.startswith("linux") or multiprocessing.current_process().daemon:
        return False
    return len(os.sched_getaffinity(0)) > 1


def _halves(
    search: Search, candidates: Sequence[Candidate]
) -> tuple[list[Candidate], list[Candidate]] | None:
    """The candidates by their settings, in turn; None where all have one."""
    numbers: dict[Hashable, int] = {}
    halves: tuple[list[Candidate], list[Candidate]] = ([], [])
    for candidate in candidates:
        *degrees, _ = search.setting_key(candidate)  # ways of computing blocks share bounds
        number = numbers.setdefault(tuple(degrees), len(numbers))
        halves[number % 2].append(candidate)
    return halves if halves[1] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """A search's result, without what is made again from it; ``best`` is one of ``solved``."""

    solved: list[tuple[Candidate, Solution, tuple[int, ...]]]
    best: int | None
    bound_s: float
    bounds: dict[Candidate, float]
    left: list[tuple[float, int, Candidate]]
    unsettled: list[Candidate]
    num_candidates: int


def _told(result: SearchResult) -> _Told:
    return _Told(
        solved=[(found.candidate, found.solution, found.cuts) for found in result.solved],
        best=next((n for n, found in enumerate(result.solved) if found is result.best), None),
        bound_s=result.bound_s,
        bounds=result.bounds,
        left=result.left,
        unsettled=result.unsettled,
        num_candidates=result.num_candidates,
    )


def _made_again(search: Search, told: _Told) -> SearchResult:
    solved = [search.made_again(*found) for found in told.solved]
    return SearchResult(
        best=None if told.best is None else solved[told.best],
        bound_s=told.bound_s,
        solved=solved,
        bounds=told.bounds,
        num_candidates=told.num_candidates,
        left=told.left,
        unsettled=told.unsettled,
    )


def _joined(one: SearchResult, other: SearchResult) -> SearchResult:
    """The result of both halves."""
    known: list[Solved] = [result.best for result in (one, other) if result.best is not None]
    return SearchResult(
        best=min(known, key=lambda solved: solved.step_s, default=None),
        bound_s=min(one.bound_s, other.bound_s),
        solved=[*one.solved, *other.solved],
        bounds=one.bounds | other.bounds,
        num_candidates=one.num_candidates + other.num_candidates,
        left=[*one.left, *other.left],
        unsettled=[*one.unsettled, *other.unsettled],
    )


class _Peer:
    """The other search, at the other end of a pipe."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.best_s = math.inf
        self.is_done = False
        self.is_lost = False  # it ended, and did not say so
        self.told: _Told | None = None

    def meet(self, best_s: float) -> float:
        """Tell the shortest step that is known here; the shortest that is known there."""
        if not self.is_done:
            self._send((best_s, False, None))
            self._receive()
        return self.best_s

    def finish(self, told: _Told | None) -> None:
        """Tell the end; nothing is told here afterwards."""
        self._send((math.inf, True, told))

    def wait(self) -> _Told | None:
        """What the other one found in the end; None if it failed."""
        if not self.is_done:
            self.finish(None)
        while not self.is_done:
            self._receive()
        return self.told

    def _send(self, message: tuple[float, bool, _Told | None]) -> None:
        with contextlib.suppress(OSError):  # it has ended; what it told before is still to be read
            self.connection.send(message)

    def _receive(self) -> None:
        try:
            best_s, is_done, told = self.connection.recv()
        except (EOFError, OSError):
            self.is_done = self.is_lost = True
            return
        self.best_s = min(self.best_s, best_s)
        if is_done:
            self.is_done, self.told = True, told
