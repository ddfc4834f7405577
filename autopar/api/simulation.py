"""``simulate``: the step of a plan, action by action, from the numbers that the plan stores."""

from __future__ import annotations

import json
import os
from pathlib import Path

from autopar.ir.errors import InputError
from autopar.ir.plan import Plan, read_plan
from autopar.solver.replay import simulate_plan
from autopar.solver.simulate import Simulation
from autopar.solver.trace import trace as trace_of


def simulate(plan: Plan | str | Path, *, trace: str | Path | None = None) -> Simulation:
    """The predicted step of ``plan``: seconds and held bytes of each stage.

    Args:
        plan: A plan, or the file of one.
        trace: Write a trace for Perfetto here; a file that is there is replaced once the new one
            is complete.

    Raises:
        PlanFormatError: The file is no plan.
        InputError: The plan does not store what it was simulated with, or the trace cannot be
            written.
    """
    plan = plan if isinstance(plan, Plan) else read_plan(plan)
    simulation = simulate_plan(plan, record=trace is not None)
    if trace is not None:
        _write(Path(trace), json.dumps(trace_of(plan, simulation), separators=(",", ":")))
    return simulation


def _write(path: Path, text: str) -> None:
    """All of ``text`` or nothing. What is no regular file (a pipe, a device) is written to."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(text)
            return
        target = path.resolve()
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            temporary.write_text(text)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot write the trace: {error.strerror or error}",
            where=str(path),
            hint="give a file in a directory that exists and may be written",
        ) from None
