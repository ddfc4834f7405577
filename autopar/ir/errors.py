"""The error tree. Every error a user can cause says what happened, where, and what to try."""

from __future__ import annotations


class AutoparError(Exception):
    """Base of all errors that a user can cause.

    Args:
        what: One sentence: what happened.
        where: The op, model source line, file, rank or stage that it happened at.
        hint: What to try.
    """

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what = what
        self.where = where
        self.hint = hint
        parts = [what]
        if where:
            parts.append(f"at: {where}")
        if hint:
            parts.append(f"try: {hint}")
        super().__init__("\n  ".join(parts))


class InputError(AutoparError):
    """A wrong argument: no such file, a bad number, a pin that cannot hold."""


class CaptureError(AutoparError):
    """The model cannot be captured as a graph."""


class ClusterError(AutoparError):
    """A cluster or hardware description is wrong, or does not match the ranks that run."""


class PlacementError(AutoparError):
    """A graph under a layout does not type-check."""


class RuleError(AutoparError):
    """A factor rule is wrong: running the op in shards gave something else than the op itself."""


class PlanFormatError(AutoparError):
    """A plan file is malformed, of another version, or belongs to another model."""


class ScheduleError(AutoparError):
    """A schedule is incomplete, out of order or would deadlock."""


class InfeasibleError(AutoparError):
    """No plan fits: the message names the fullest rank, what fills it, and what would fit."""


class RankFailedError(AutoparError):
    """A rank failed in a step: the message names rank, stage, action and op."""
