"""``diff``: two plans side by side."""

from __future__ import annotations

from pathlib import Path

from autopar.ir.plan import Plan, read_plan
from autopar.ir.plan_diff import PlanDiff, diff_plans


def diff(one: Plan | str | Path, other: Plan | str | Path) -> PlanDiff:
    """What differs between two plans, or the files of two, whatever they are for.

    Raises:
        PlanFormatError: A file is no plan.
    """
    plans = [plan if isinstance(plan, Plan) else read_plan(plan) for plan in (one, other)]
    names = [
        letter if isinstance(plan, Plan) else Path(plan).stem
        for letter, plan in (("a", one), ("b", other))
    ]
    if names[0] == names[1]:
        names = ["a", "b"]
    return diff_plans(plans[0], plans[1], names=(names[0], names[1]))
