"""The command line with a clock: `benchmarks/solver_phases.py SPANS.json plan MODEL …` writes how
long each phase of a plan takes.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

_TIMED: tuple[tuple[str, str, str], ...] = (
    ("model", "autopar.capture.sources", "open_model"),
    ("model", "autopar.capture.sources", "ConfigSource.build"),
    ("model", "autopar.capture.sources", "FunctionSource.build"),
    ("capture", "autopar.api.planning", "capture_model"),
    ("search", "autopar.solver.search", "Search.run"),
    ("bounds", "autopar.solver.refiner", "Refiner.scalar"),
    ("bounds", "autopar.solver.refiner", "Refiner.stages"),
    ("problem", "autopar.solver.settings", "make_setting"),
    ("problem", "autopar.solver.layout.make", "make_problem"),
    ("solving", "autopar.solver.layout.solve", "ProblemSolver.solve"),
    ("solving", "autopar.solver.layout.solve", "ProblemSolver.least"),
    ("simulate", "autopar.solver.solved", "simulate_cuts"),
    ("write", "autopar.passes.plan_moves", "plan_moves"),
    ("write", "autopar.solver.predict", "predict"),
    ("write", "autopar.ir.plan", "Plan.save"),
    ("write", "autopar.ir.plan", "Plan.explain"),
)
"""(phase, module, function): the seconds of its calls, those of other phases in them apart."""

PHASES = ("imports", *dict.fromkeys(phase for phase, _, _ in _TIMED))

P = ParamSpec("P")
T = TypeVar("T")


class Clock:
    """Seconds of each phase on the clock; of phases that call each other the inner one counts."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._open = threading.local()

    def timed(self, phase: str, function: Callable[P, T]) -> Callable[P, T]:
        """``function``, whose calls count for ``phase``."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            inner: list[float] = getattr(self._open, "inner", [])
            self._open.inner = inner
            inner.append(0.0)
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - started
                self.seconds[phase] += took - inner.pop()
                if inner:
                    inner[-1] += took

        return call

    def watch(self, phase: str, module: str, name: str) -> None:
        """Count a function's calls, by whatever module of autopar they are made."""
        owner = importlib.import_module(module)
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        original = getattr(owner, last)
        replaced = self.timed(phase, original)
        setattr(owner, last, replaced)
        for other in [found for key, found in sys.modules.items() if key.startswith("autopar")]:
            for attribute, value in list(vars(other).items()):
                if value is original:
                    setattr(other, attribute, replaced)


def run_command(arguments: Sequence[str], spans: Path) -> int:
    """Run ``autopar`` with these arguments, and write the seconds of its phases to ``spans``."""
    clock = Clock()
    started = time.perf_counter()
    cli = importlib.import_module("autopar.cli")
    importlib.import_module("autopar.api")
    clock.seconds["imports"] = time.perf_counter() - started
    for phase, module, name in _TIMED:
        clock.watch(phase, module, name)
    status: int = cli.main(arguments)
    spans.write_text(json.dumps(clock.seconds))
    return status


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[2:], Path(sys.argv[1])))
