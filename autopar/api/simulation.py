"""``simulate``: the step of a plan, action by action, from the numbers that the plan stores."""

from __future__ import annotations

import json
from pathlib import Path

from autopar.api.files import write_text
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
        text = json.dumps(trace_of(plan, simulation), separators=(",", ":"))
        write_text(Path(trace), text, "trace")
    return simulation
