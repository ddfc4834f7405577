"""The step of a plan, simulated again from the numbers that the plan stores."""

from __future__ import annotations

from autopar.ir.errors import InputError
from autopar.ir.plan import ActionCosts, Plan
from autopar.ir.schedules import compact_schedule
from autopar.ir.zero_stages import segment_zero_stages
from autopar.solver.simulate import SegmentTimes, Simulation, Work, simulate_together


def simulate_plan(plan: Plan, *, record: bool = False) -> Simulation:
    """What the plan predicts, action by action; no model and no cluster is needed.

    Args:
        plan: With the costs of its actions.
        record: Whether to keep the timeline.

    Raises:
        InputError: An older autopar wrote the plan, and did not store them.

    With unequal shares of the batch it is what the ranks do that wait least for others.
    """
    costs = plan.prediction.action_costs
    if costs is None:
        raise InputError(
            "the plan does not store the costs of its actions, so that it cannot be simulated",
            hint="plan again with this version of autopar",
        )
    numbers = [share.num_micro_batches for share in plan.batch.shares]
    if not numbers:
        work = _work(plan, costs, plan.batch.num_micro_batches)
        return simulate_together([work], record=record)[0]
    pairs = zip(plan.prediction.beside, numbers, strict=True)
    found = simulate_together([_work(plan, own, number) for own, number in pairs], record=record)
    return max(found, key=lambda simulation: simulation.busy_s)


def _work(plan: Plan, costs: ActionCosts, num_micro_batches: int) -> Work:
    return Work(
        schedule=compact_schedule(
            plan.schedule.name,
            [segment.stage for segment in plan.segments],
            num_micro_batches,
            zero_stage=segment_zero_stages(plan),
            extra_in_flight=plan.schedule.extra_in_flight,
            offloaded=plan.offloaded_segments(),
        ),
        times=segment_times_of(costs),
        optimizer_s=costs.optimizer_s,
        slowdown=costs.slowdowns or costs.slowdown,
    )


def segment_times_of(costs: ActionCosts) -> SegmentTimes:
    """The costs that a plan stores, as the simulator takes them."""
    segments = costs.segments
    return SegmentTimes(
        forward_s=tuple(segment.forward_s for segment in segments),
        backward_s=tuple(segment.backward_s for segment in segments),
        gather_s=tuple(segment.gather_s for segment in segments),
        reduce_s=tuple(segment.reduce_s for segment in segments),
        send_s=tuple(segment.send_s for segment in segments),
        held_bytes=tuple(segment.held_bytes for segment in segments),
        weight_s=tuple(segment.weight_s for segment in segments),
        weight_bytes=tuple(segment.weight_bytes for segment in segments),
        copy_s=tuple(segment.copy_s for segment in segments),
    )
