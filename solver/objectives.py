"""What a plan is the best of: objectives over GPUs, batch and seconds of a step.

Each is a number that never falls when a step takes longer, so that a bound on the step bounds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from autopar.ir.errors import InputError
from autopar.ir.plan_search import ObjectiveName
from autopar.solver.training_length import TrainingLength

_HOUR_S = 3600.0
_MILLION = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a step is of: GPUs that are all used, and sequences of so many tokens."""

    num_gpus: int
    global_batch_size: int
    seq_len: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.global_batch_size * self.seq_len


class Objective(Protocol):
    """A number to minimize. ``settings`` are what it was made of, for the plan."""

    @property
    def name(self) -> ObjectiveName: ...

    @property
    def unit(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, float]: ...

    def value(self, point: Point, step_s: float) -> float:
        """Never less for a longer step; infinite for a step that will not do."""
        ...

    def longest_step_s(self, point: Point, value: float) -> float:
        """The longest step that is not worse than ``value``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step."""

    name: ObjectiveName = "step_time"
    unit: str = "s"
    settings: Mapping[str, float] = field(default_factory=dict)

    def value(self, point: Point, step_s: float) -> float:
        """``step_s`` itself."""
        return step_s

    def longest_step_s(self, point: Point, value: float) -> float:
        """Inverse of ``value``."""
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost:
    """Money for a million tokens, at a price of a GPU's hour.

    Raises:
        InputError: The price is not positive.
    """

    price_per_gpu_hour: float
    name: ObjectiveName = "cost"
    unit: str = "per million tokens"

    def __post_init__(self) -> None:
        _check_positive("price_per_gpu_hour", self.price_per_gpu_hour)

    @property
    def settings(self) -> Mapping[str, float]:
        """The price."""
        return {"price_per_gpu_hour": self.price_per_gpu_hour}

    def value(self, point: Point, step_s: float) -> float:
        """GPUs · price · time, over tokens."""
        price = point.num_gpus * self.price_per_gpu_hour / _HOUR_S
        return price * step_s / point.tokens * _MILLION

    def longest_step_s(self, point: Point, value: float) -> float:
        """Inverse of ``value``."""
        return value / _MILLION * point.tokens * _HOUR_S / self.price_per_gpu_hour / point.num_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class FewestGpus:
    """GPUs, of steps that meet a deadline.

    Attributes:
        deadline_s: Seconds of a step at most, or of a whole training.
        length: That training; None: the deadline is of a step.

    Raises:
        InputError: The deadline is not positive.
    """

    deadline_s: float
    length: TrainingLength | None = None
    name: ObjectiveName = "gpus"
    unit: str = "GPUs"

    def __post_init__(self) -> None:
        _check_positive("deadline_s", self.deadline_s)

    @property
    def settings(self) -> Mapping[str, float]:
        """The deadline, and what is known of the training."""
        return {"deadline_s": self.deadline_s, **_length_settings(self.length)}

    def step_deadline_s(self, global_batch_size: int) -> float:
        """Seconds of a step at most."""
        if self.length is None:
            return self.deadline_s
        return self.deadline_s / self.length.steps(global_batch_size)

    def value(self, point: Point, step_s: float) -> float:
        """GPUs; infinite where the step takes longer than it may."""
        meets = step_s <= self.step_deadline_s(point.global_batch_size)
        return float(point.num_gpus) if meets else math.inf

    def longest_step_s(self, point: Point, value: float) -> float:
        """Inverse of ``value``."""
        return self.step_deadline_s(point.global_batch_size) if point.num_gpus <= value else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTime:
    """Seconds of a whole training, whose steps are fewer for larger batches."""

    length: TrainingLength
    name: ObjectiveName = "training_time"
    unit: str = "s"

    @property
    def settings(self) -> Mapping[str, float]:
        """What is known of the training."""
        return _length_settings(self.length)

    def value(self, point: Point, step_s: float) -> float:
        """Steps · ``step_s``."""
        return self.length.seconds(point.global_batch_size, step_s)

    def longest_step_s(self, point: Point, value: float) -> float:
        """Inverse of ``value``."""
        return value / self.length.steps(point.global_batch_size)


def _length_settings(length: TrainingLength | None) -> dict[str, float]:
    if length is None:
        return {}
    return {
        "fewest_sequences": length.fewest_sequences,
        "critical_batch_size": length.critical_batch,
    }


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InputError(f"{name} is {value}; it must be a positive number")
