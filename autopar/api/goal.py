"""A goal: the objective that a user names, with its numbers, before the model is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from autopar.api.arguments import ObjectiveArguments
from autopar.ir.errors import InputError
from autopar.ir.plan_search import ObjectiveName
from autopar.solver import Cluster
from autopar.solver.objectives import FewestGpus, Objective, StepTime, TokenCost, TrainingTime
from autopar.solver.ranges import gpu_counts
from autopar.solver.training_length import TrainingLength

_NEEDED: Mapping[ObjectiveName, tuple[str, ...]] = {
    "step_time": (),
    "cost": ("price_per_gpu_hour",),
    "gpus": ("deadline_s",),
    "training_time": ("token_budget",),
}
_ALLOWED: Mapping[ObjectiveName, tuple[str, ...]] = {
    "step_time": (),
    "cost": (),
    "gpus": ("token_budget", "critical_batch_size"),
    "training_time": ("critical_batch_size",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is to be best. The numbers are as of ``ObjectiveArguments``."""

    name: ObjectiveName = "step_time"
    price_per_gpu_hour: float | None = None
    deadline_s: float | None = None
    token_budget: float | None = None
    critical_batch_size: float | None = None

    def objective(self, seq_len: int) -> Objective:
        """The objective for sequences of so many tokens."""
        if self.name == "cost":
            assert self.price_per_gpu_hour is not None
            return TokenCost(price_per_gpu_hour=self.price_per_gpu_hour)
        if self.name == "gpus":
            assert self.deadline_s is not None
            return FewestGpus(deadline_s=self.deadline_s, length=self._length(seq_len))
        if self.name == "training_time":
            length = self._length(seq_len)
            assert length is not None
            return TrainingTime(length=length)
        return StepTime()

    def batches(self) -> tuple[int, ...]:
        """Batches to choose from where none is given; empty: the objective does not choose."""
        length = self._length(1) if self.name == "training_time" else None
        return () if length is None else length.batches()

    def _length(self, seq_len: int) -> TrainingLength | None:
        if self.token_budget is None:
            return None
        return TrainingLength.to_budget(
            self.token_budget, seq_len=seq_len, critical_batch=self.critical_batch_size
        )


def make_goal(given: ObjectiveArguments, *, batch_is_given: bool) -> Goal:
    """The goal of these arguments.

    Raises:
        InputError: An unknown objective, a number that it needs and that is missing, one that it
            has no use for, or one that is out of range.
    """
    name = given.get("objective", "step_time")
    if name not in _NEEDED:
        known = ", ".join(_NEEDED)
        raise InputError(f"objective is {name!r}; it can be {known}")
    numbers = [field.name for field in fields(Goal) if field.name != "name"]
    present = {number: given.get(number) for number in numbers if given.get(number) is not None}
    for number in _NEEDED[name]:
        if number not in present:
            raise InputError(f"objective {name!r} needs {number}")
    for number in present:
        if number not in (*_NEEDED[name], *_ALLOWED[name]):
            raise InputError(f"{number} is given, but objective {name!r} has no use for it")
    if "critical_batch_size" in present and "token_budget" not in present:
        raise InputError(
            "critical_batch_size is given without token_budget: how long is the training?"
        )
    if name == "training_time" and not batch_is_given and "critical_batch_size" not in present:
        raise InputError(
            "objective 'training_time' chooses the batch by critical_batch_size, which is missing",
            hint="give it, or a global_batch_size",
        )
    goal = Goal(
        name=name,
        price_per_gpu_hour=given.get("price_per_gpu_hour"),
        deadline_s=given.get("deadline_s"),
        token_budget=given.get("token_budget"),
        critical_batch_size=given.get("critical_batch_size"),
    )
    goal.objective(seq_len=1)  # numbers that are out of range are known before the capture
    return goal


def clusters_of(cluster: Cluster, gpus: int | tuple[int, int] | None) -> tuple[Cluster, ...]:
    """The clusters of a GPU range, fewest GPUs first; without one the cluster as it is.

    Raises:
        InputError: It is no range, or has no count that is whole nodes or divides one.
    """
    if gpus is None:
        return (cluster,)
    low, high = (gpus, gpus) if isinstance(gpus, int) else gpus
    if not all(isinstance(end, int) for end in (low, high)) or not 1 <= low <= high:
        raise InputError(f"gpus is {gpus}; give a number of GPUs, or (fewest, most)")
    counts = gpu_counts(cluster, low, high)
    if not counts:
        raise InputError(
            f"gpus is {gpus}, but none of it is whole nodes of {cluster.gpus_per_node} GPUs, or "
            "divides one",
        )
    return tuple(cluster.with_gpus(count) for count in counts)
