"""What a plan says of the search that found it: what lost and why, and what changes would buy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

import pydantic
from pydantic.dataclasses import dataclass

STRICT = pydantic.ConfigDict(
    extra="forbid", strict=True, json_schema_serialization_defaults_required=True
)
"""How every part of a plan is read."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Alternative:
    """A candidate that lost, and what it would cost.

    ``step_s`` is None where it was only bounded, by ``bound_s``. Of one that was simulated,
    ``seconds_by_cause`` are those of the ranks that wait least, and ``bytes_by_cause`` those of the
    fullest rank.
    """

    description: str
    step_s: float | None
    reason: str
    bound_s: float | None = None
    seconds_by_cause: Mapping[str, float] = field(default_factory=dict)
    bytes_by_cause: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class DecisionValue:
    """What all candidates with one value of a decision can reach.

    ``bound_s``: none of them takes less (None: none fits into memory). ``step_s``: the fastest that
    was simulated (None: none was). ``chosen``: whether the plan has this value.
    """

    decision: str
    value: str
    num_candidates: int
    bound_s: float | None
    step_s: float | None
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SearchReport:
    """What became of the candidates: how many by fate (``FATES``), and what each value of each
    decision can reach.
    """

    fates: Mapping[str, int]
    values: tuple[DecisionValue, ...]


FATES = {
    "solved": "solved and simulated",
    "no_memory": "too large for memory",
    "roofline": "cut: slower than the best even at the roofline",
    "stages": "cut: no layout and no stage cuts are as fast as the best",
    "no_layout": "tried, and no layout that fits was found",
    "not_reached": "left when the limit of work or time was reached",
}
"""What can become of a candidate, in words."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class WhatIf:
    """The best step on a cluster with one change: what the change would buy.

    ``bound_s`` bounds it as the certificate does the plan's. ``description`` says the decisions of
    the best plan then, ``same_decisions`` whether they are those of this plan.
    """

    change: str
    step_s: float
    bound_s: float
    description: str
    same_decisions: bool


ObjectiveName = Literal["step_time", "cost", "gpus", "training_time"]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class CountPlan:
    """The best of a number of GPUs (and of a batch, where that was chosen, too).

    ``step_s`` and ``value`` are None where it was bounded and not solved, or nothing was found that
    will do; ``value`` also where the step takes longer than it may. ``bound`` is that of the
    objective; None: it cannot do, or nothing fits.
    """

    num_gpus: int
    global_batch_size: int
    step_s: float | None
    value: float | None
    bound: float | None
    description: str | None


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ObjectivePlan:
    """What the plan is the best of, and what is proved of that over all GPU counts and batches.

    ``unit`` is that of ``value`` and ``bound``; ``gap`` = 1 − bound / value. ``settings`` are the
    numbers that it was asked for with.
    """

    name: ObjectiveName
    unit: str
    settings: Mapping[str, float]
    value: float
    bound: float
    gap: float
    by_count: tuple[CountPlan, ...]
