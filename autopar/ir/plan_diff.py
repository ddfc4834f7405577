"""Two plans side by side: decisions that differ, and seconds and bytes by cause."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

from autopar.ir.plan import ParameterPlan, Plan, check_prediction
from autopar.ir.tables import columns
from autopar.ir.units import bytes_text, seconds_text

Number = TypeVar("Number", int, float)

_NUM_PLACEMENTS = 12
"""So many parameter placements that differ are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision that two plans make differently; None where a plan does not make it."""

    name: str
    one: str | None
    other: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """What differs between two plans. Prints itself.

    Attributes:
        names: What the plans are called.
        notes: What has to be known to compare them: another model, batch, or cluster.
        decisions: Those that differ.
        numbers: What is predicted of a step as a whole: name, value of each, as text.
        seconds_by_cause: Of the stage that waits least in each plan.
        bytes_by_cause: Of the fullest rank of each plan.
    """

    names: tuple[str, str]
    notes: tuple[str, ...]
    decisions: tuple[Decision, ...]
    numbers: tuple[tuple[str, str, str], ...]
    seconds_by_cause: Mapping[str, tuple[float, float]]
    bytes_by_cause: Mapping[str, tuple[int, int]]

    def explain(self) -> str:
        """The differences in words and tables."""
        one, other = self.names
        parts = ["\n".join(f"note: {note}" for note in self.notes)] if self.notes else []
        if self.decisions:
            rows = [(d.name, _shown(d.one), _shown(d.other)) for d in self.decisions]
            parts.append(columns(("decisions that differ", one, other), rows))
        else:
            parts.append("all decisions are the same")
        parts.append(columns(("predicted", one, other), self.numbers))
        parts.append(
            columns(
                ("time of a step", one, other, "difference"),
                list(_cause_rows(self.seconds_by_cause, seconds_text)),
            )
        )
        parts.append(
            columns(
                ("memory of the fullest rank", one, other, "difference"),
                list(_cause_rows(self.bytes_by_cause, lambda num: bytes_text(int(num)))),
            )
        )
        return "\n\n".join(parts)

    def __str__(self) -> str:
        return self.explain()


def diff_plans(one: Plan, other: Plan, *, names: tuple[str, str] = ("a", "b")) -> PlanDiff:
    """What differs between two plans, whatever models and clusters they are for."""
    for plan in (one, other):
        check_prediction(plan)
    first, second = one.prediction, other.prediction
    return PlanDiff(
        names=names,
        notes=tuple(_notes(one, other)),
        decisions=tuple(_decisions(one, other)),
        numbers=tuple(_numbers(one, other)),
        seconds_by_cause=_beside(
            first.critical.seconds_by_cause, second.critical.seconds_by_cause, 0.0
        ),
        bytes_by_cause=_beside(first.fullest.bytes_by_cause, second.fullest.bytes_by_cause, 0),
    )


def _notes(one: Plan, other: Plan) -> Iterator[str]:
    if one.model.fingerprint != other.model.fingerprint:
        same_name = one.model.name == other.model.name
        what = (
            f"{one.model.name} with other shapes or in another precision"
            if same_name
            else f"{one.model.name} and {other.model.name}"
        )
        yield f"the plans are of different models ({what}): they do different work"
    if one.cluster.fingerprint != other.cluster.fingerprint:
        texts = [f"{c} ({c.fingerprint[:8]})" for c in (one.cluster, other.cluster)]
        yield f"the plans are for different clusters: {texts[0]}, and {texts[1]}"
    tokens = [_tokens(plan) for plan in (one, other)]
    if tokens[0] != tokens[1]:
        yield (
            f"a step has {tokens[0]:,} and {tokens[1]:,} tokens: compare seconds of a token rather "
            "than of a step"
        )


def _tokens(plan: Plan) -> int:
    return plan.batch.global_batch_size * (plan.model.seq_len or 1)


def _decisions(one: Plan, other: Plan) -> Iterator[Decision]:
    both = zip(_decided(one), _decided(other), strict=True)
    for (name, first), (_, second) in both:
        if first != second:
            yield Decision(name=name, one=first, other=second)
    for pin in dict.fromkeys((*one.pins, *other.pins)):
        values = [str(plan.pins[pin]) if pin in plan.pins else None for plan in (one, other)]
        if values[0] != values[1]:
            yield Decision(name=f"pinned {pin}", one=values[0], other=values[1])
    yield from _placements(one, other)


def _decided(plan: Plan) -> Iterator[tuple[str, str]]:
    """Every decision but placements, as text."""
    parts = (("", plan.mesh), ("", plan.batch), ("", plan.schedule), ("training ", plan.training))
    for prefix, part in parts:
        for field in fields(part):
            name = "schedule" if part is plan.schedule and field.name == "name" else field.name
            yield f"{prefix}{name}", str(getattr(part, field.name))
    yield "blocks of stages", _cuts(plan)
    yield "groups of nodes by rank", ", ".join(group.name for group in plan.cluster.groups)
    traffic = [move for move in plan.moves if (move.forward, move.backward) != ("none", "none")]
    num_bytes = sum(move.bytes for move in traffic)
    yield "collectives of a micro-batch", f"{len(traffic)} of {bytes_text(num_bytes)}"


def _cuts(plan: Plan) -> str:
    """Blocks of each run of segments on one stage: ``0-16 | 17-33``."""
    runs = itertools.groupby(plan.segments, key=lambda segment: segment.stage)
    texts: list[str] = []
    for _, segments in runs:
        held = list(segments)
        texts.append(f"{held[0].first_block}-{held[-1].last_block}")
    return " | ".join(texts)


def _placements(one: Plan, other: Plan) -> Iterator[Decision]:
    """Parameters that are placed otherwise on an axis, those of all layers together.

    Only parameters that both plans have are compared, where their axes have several ranks.
    """
    found: dict[tuple[str, str | None, str | None], int] = {}
    for name in one.parameters:
        if name not in other.parameters:
            continue
        first = _states(one, one.parameters[name])
        second = _states(other, other.parameters[name])
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        for axis in dict.fromkeys((*first, *second)):
            if first.get(axis) != second.get(axis):
                key = (f"{pattern} on {axis}", first.get(axis), second.get(axis))
                found[key] = found.get(key, 0) + 1
    for number, ((name, before, after), count) in enumerate(found.items()):
        if number == _NUM_PLACEMENTS:
            yield Decision(
                name=f"… and {len(found) - number} more parameters", one=None, other=None
            )
            return
        yield Decision(name=name + (f" ×{count}" if count > 1 else ""), one=before, other=after)


def _states(plan: Plan, parameter: ParameterPlan) -> dict[str, str]:
    """The parameter's state on each axis that has several ranks."""
    mesh = plan.device_mesh()
    return {
        axis: state
        for axis, state in zip(plan.layout_axes, parameter.placement, strict=True)
        if mesh.size(axis) > 1 and axis != "dp"
    }


def _numbers(one: Plan, other: Plan) -> Iterator[tuple[str, str, str]]:
    def row(name: str, text: Callable[[Plan], str]) -> tuple[str, str, str]:
        return name, text(one), text(other)

    yield row("step", lambda plan: seconds_text(plan.prediction.step_s))
    yield row("tokens/s", lambda plan: f"{plan.prediction.tokens_per_s:,.0f}")
    yield row(
        "GPU-seconds of a million tokens",
        lambda plan: f"{_num_gpus(plan) * 1e6 / plan.prediction.tokens_per_s:,.4g}",
    )
    yield row("MFU", lambda plan: f"{plan.prediction.mfu:.1%}")
    yield row("proved gap", lambda plan: f"{plan.certificate.gap:.2%}")
    yield row("GPUs", lambda plan: f"{_num_gpus(plan):,}")


def _num_gpus(plan: Plan) -> int:
    return plan.device_mesh().num_ranks


def _beside(
    one: Mapping[str, Number], other: Mapping[str, Number], nothing: Number
) -> dict[str, tuple[Number, Number]]:
    """Both by cause, the largest first."""
    causes = dict.fromkeys((*one, *other))
    found: dict[str, tuple[Number, Number]] = {
        cause: (one.get(cause, nothing), other.get(cause, nothing)) for cause in causes
    }
    return dict(sorted(found.items(), key=lambda pair: -max(pair[1])))


def _cause_rows(
    causes: Mapping[str, tuple[float, float]], text: Callable[[float], str]
) -> Iterable[tuple[str, str, str, str]]:
    def row(name: str, one: float, other: float) -> tuple[str, str, str, str]:
        more = other - one
        return name, text(one), text(other), ("−" if more < 0 else "+") + text(abs(more))

    sums = [sum(pair[place] for pair in causes.values()) for place in (0, 1)]
    nothing = 1e-9 * max(sums)  # rounding
    for cause, pair in causes.items():
        if max(pair) > nothing:
            one, other = (value if value > nothing else 0 for value in pair)
            yield row(f"  {cause}", one, other)
    yield row("  together", *sums)


def _shown(value: str | None) -> str:
    return "–" if value is None else value
