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
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from autopar.solver.candidates import Candidate
from autopar.solver.layout.problem import Solution
from autopar.solver.search import Search
from autopar.solver.search_result import SearchResult

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
    halves = _halves(candidates) if _may_fork() and len(candidates) >= _FEW else None
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
        cutoff_s = min(cutoff_s, result.best_s)
        return result.joined(search.run(others, cutoff_s=cutoff_s, stop_at_s=stop_at_s))
    return result.joined(_made_again(search, told))


def _may_fork() -> bool:
    """Whether there is a second core, and a process that may use it."""
    if not sys.platform.startswith("linux") or multiprocessing.current_process().daemon:
        return False
    return len(os.sched_getaffinity(0)) > 1


def _halves(candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]] | None:
    """The candidates by their settings, in turn; None where all have one."""
    numbers: dict[Hashable, int] = {}
    halves: tuple[list[Candidate], list[Candidate]] = ([], [])
    for candidate in candidates:
        *degrees, _ = candidate.setting_key  # ways of computing blocks share bounds
        number = numbers.setdefault(tuple(degrees), len(numbers))
        halves[number % 2].append(candidate)
    return halves if halves[1] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """A search's result: the decisions of what it solved, which of them is best, and the rest."""

    decisions: list[tuple[Candidate, Solution, tuple[int, ...]]]
    best: int | None
    rest: SearchResult


def _told(result: SearchResult) -> _Told:
    return _Told(
        decisions=[(found.candidate, found.solution, found.cuts) for found in result.solved],
        best=next((n for n, found in enumerate(result.solved) if found is result.best), None),
        rest=replace(result, best=None, solved=[]),
    )


def _made_again(search: Search, told: _Told) -> SearchResult:
    solved = [search.refiner.made_again(*found) for found in told.decisions]
    best = None if told.best is None else solved[told.best]
    return replace(told.rest, best=best, solved=solved)


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
