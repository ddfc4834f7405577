"""Why a plan and no other, in words. Reads only what the plan stores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from autopar.ir.plan_search import (
    FATES,
    Alternative,
    CountPlan,
    DecisionValue,
    ObjectiveName,
    ObjectivePlan,
)
from autopar.ir.tables import named_rows
from autopar.ir.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from autopar.ir.plan import Plan

OBJECTIVES: Mapping[ObjectiveName, str] = {
    "step_time": "shortest step",
    "cost": "least cost",
    "gpus": "fewest GPUs that meet the deadline",
    "training_time": "shortest training",
}
_DAY_S = 86_400
_NUM_CAUSES = 3
_SMALL = 0.001
"""Differences below this share of the step are not told."""


def runners_up(plan: Plan) -> str:
    """What lost, what it would cost, and which causes make the difference."""
    if not plan.alternatives:
        return ""
    told = sorted(plan.alternatives, key=lambda other: other.step_s or other.bound_s or math.inf)
    return "\n".join(("runners-up", named_rows([_runner_up(plan, other) for other in told])))


def _runner_up(plan: Plan, other: Alternative) -> tuple[str, str]:
    step_s = plan.prediction.step_s
    if other.step_s is None:
        least = "–" if other.bound_s is None else f"≥ {signed_percent(other.bound_s / step_s - 1)}"
        return least, f"{other.description}: {other.reason}"
    text = f"{other.description}: {other.reason}"
    why = _why(plan, other)
    return signed_percent(other.step_s / step_s - 1), f"{text}\n{why}" if why else text


def _why(plan: Plan, other: Alternative) -> str:
    if not other.seconds_by_cause:
        return ""
    step_s = plan.prediction.step_s
    grown = differences(plan.prediction.critical.seconds_by_cause, other.seconds_by_cause)
    told = {cause: more for cause, more in grown.items() if abs(more) >= _SMALL * step_s}
    parts = [
        f"{cause} {signed_seconds(more)}"
        for cause, more in itertools.islice(told.items(), _NUM_CAUSES)
    ]
    fullest = plan.prediction.fullest
    needs = sum(other.bytes_by_cause.values())
    if abs(needs - fullest.peak_bytes) > 0.01 * plan.prediction.usable_bytes:
        parts.append(f"fullest rank {bytes_text(needs)}")
    return ", ".join(parts)


def differences(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """``other`` − ``one`` by cause, the largest first."""
    causes = dict.fromkeys((*one, *other))
    found = {cause: other.get(cause, 0) - one.get(cause, 0) for cause in causes}
    return dict(sorted(found.items(), key=lambda pair: -abs(pair[1])))


def signed_seconds(seconds: float) -> str:
    """``+12.3 ms`` or ``−12.3 ms``."""
    return ("−" if seconds < 0 else "+") + seconds_text(abs(seconds))


def signed_percent(share: float) -> str:
    """``+1.2%`` or ``−1.2%``; ``0.0%`` has no sign."""
    text = f"{abs(share):.1%}"
    if text == "0.0%":
        return text
    return ("−" if share < 0 else "+") + text


def objective(plan: Plan) -> str:
    """What the plan is the best of, and what other GPU counts reach."""
    found = plan.objective
    if found is None or (found.name == "step_time" and len(found.by_count) == 1):
        return ""
    numbers = ", ".join(f"{name} {value:g}" for name, value in found.settings.items())
    title = (
        f"{OBJECTIVES[found.name]}: {_amount(found, found.value)}, at least "
        f"{_amount(found, found.bound)} over the whole range (gap {found.gap:.2%})"
    )
    batches = {count.global_batch_size for count in found.by_count}
    rows = [
        (f"{count.num_gpus:,} GPUs", _count(found, count, told=len(batches) > 1))
        for count in found.by_count
    ]
    return "\n".join((title + (f"; {numbers}" if numbers else ""), named_rows(rows)))


def _count(found: ObjectivePlan, count: CountPlan, *, told: bool) -> str:
    batch = f"batch {count.global_batch_size:,}: " if told else ""
    if count.bound is None:
        return f"{batch}will not do, or does not fit"
    least = _amount(found, count.bound)
    if count.step_s is None:
        return f"{batch}at least {least}"
    step = "" if found.name == "step_time" else f"step {seconds_text(count.step_s)}, "
    value = "too slow" if count.value is None else _amount(found, count.value)
    return f"{batch}{value} (at least {least}), {step}{count.description}"


def _amount(found: ObjectivePlan, value: float) -> str:
    """A value of the objective with its unit."""
    if found.name == "training_time":
        return f"{value / _DAY_S:.4g} days" if value >= _DAY_S else seconds_text(value)
    if found.name == "step_time":
        return seconds_text(value)
    return f"{value:.4g} {found.unit}"


def rejected(plan: Plan) -> str:
    """What became of the candidates, and what other values of each decision can reach."""
    report = plan.search
    if report is None:
        return ""
    fates = [(f"{num:,}", FATES.get(fate, fate)) for fate, num in report.fates.items() if num]
    parts = ["\n".join(("candidates", named_rows(fates)))]
    by_decision: dict[str, list[DecisionValue]] = {}
    for value in report.values:
        by_decision.setdefault(value.decision, []).append(value)
    rows = [
        (decision, ", ".join(_value(plan, value) for value in values))
        for decision, values in by_decision.items()
    ]
    if rows:
        title = "other decisions, whatever goes with them, beside this step"
        parts.append("\n".join((title, named_rows(rows))))
    return "\n\n".join(parts)


def _value(plan: Plan, value: DecisionValue) -> str:
    step_s = plan.prediction.step_s
    if value.chosen:
        return f"{value.value} chosen"
    if value.bound_s is None:
        return f"{value.value} does not fit"
    least = max(0.0, value.bound_s / step_s - 1)
    if value.step_s is None:
        return f"{value.value} ≥ {signed_percent(least)}"
    found = signed_percent(value.step_s / step_s - 1)
    return f"{value.value} ≥ {signed_percent(least)} (found {found})"


def shadow_prices(plan: Plan) -> str:
    """What changes of the cluster would buy."""
    if not plan.what_if:
        return ""
    step_s = plan.prediction.step_s
    rows = [
        (
            change.change,
            f"step {seconds_text(change.step_s)} ({signed_percent(change.step_s / step_s - 1)}, "
            f"at best {signed_percent(change.bound_s / step_s - 1)}), "
            + ("same decisions" if change.same_decisions else change.description),
        )
        for change in plan.what_if
    ]
    return "\n".join(("what changes would buy", named_rows(rows)))
