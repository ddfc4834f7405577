"""``autopar simulate``."""

from __future__ import annotations

import argparse
import json

from autopar import api
from autopar.ir.plan import Plan, read_plan
from autopar.ir.units import bytes_text, counted, seconds_text
from autopar.ir.zero_stages import zero_text


def run(arguments: argparse.Namespace) -> int:
    """Simulate the step of a plan; print its seconds and bytes by stage, and write a trace."""
    plan = read_plan(arguments.plan)
    simulation = api.simulate(plan, trace=arguments.trace)
    print(
        json.dumps(_document(simulation), indent=1) if arguments.json else _text(plan, simulation)
    )
    return 0


def _document(simulation: api.Simulation) -> dict[str, object]:
    return {
        "step_s": simulation.step_s,
        "stages": [
            {
                "busy_s": simulation.busy_s[stage],
                "exposed_s": simulation.exposed_s[stage],
                "copying_s": simulation.copying_s[stage],
                "waiting_s": simulation.waiting_s[stage],
                "bubble": simulation.bubble[stage],
                "peak_held_bytes": simulation.peak_held_bytes[stage],
            }
            for stage in range(len(simulation.busy_s))
        ],
    }


def _text(plan: Plan, simulation: api.Simulation) -> str:
    schedule, batch = plan.schedule, plan.batch
    virtual = f" × {schedule.virtual_stages} virtual stages" * (schedule.virtual_stages > 1)
    extra = f", {schedule.extra_in_flight} more in flight" * (schedule.extra_in_flight > 0)
    extra += f", loss in {schedule.loss_chunks} chunks" * (schedule.loss_chunks > 1)
    extra += ", optimizer state offloaded" * schedule.offload_optimizer
    extra += ", activations offloaded" * bool(schedule.offloaded_blocks)
    zero = zero_text(schedule.zero_stage, schedule.zero_stages)
    title = (
        f"step {seconds_text(simulation.step_s)}: {schedule.name}{virtual}{extra}, ZeRO stage "
        f"{zero}, {counted(batch.num_micro_batches, 'micro-batches')}"
    )
    copies = any(simulation.copying_s)
    rows: list[tuple[str, ...]] = [
        ("stage", "busy", "exposed", *["copying"] * copies, "waiting", "bubble", "holds at most")
    ]
    rows += [
        (
            str(stage),
            seconds_text(busy),
            seconds_text(simulation.exposed_s[stage]),
            *[seconds_text(simulation.copying_s[stage])] * copies,
            seconds_text(simulation.waiting_s[stage]),
            f"{simulation.bubble[stage]:.1%}",
            bytes_text(simulation.peak_held_bytes[stage]),
        )
        for stage, busy in enumerate(simulation.busy_s)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join((title, "", *lines))
