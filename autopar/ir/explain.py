"""A plan in words. Reads only what the plan stores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from autopar.ir.explain_search import objective, rejected, runners_up, shadow_prices
from autopar.ir.kernels import DEFAULT_KERNELS
from autopar.ir.mesh import MESH_AXES, Mesh
from autopar.ir.tables import named_rows
from autopar.ir.units import bytes_text, counted, seconds_text
from autopar.ir.zero_stages import block_zero_stages, zero_text

if TYPE_CHECKING:
    from autopar.ir.plan import Plan, Prediction, SegmentPlan

_ROUNDING = 1e-9
"""Causes of a smaller share are nothing."""


def explain(plan: Plan) -> str:
    """The plan as text for a terminal, about a screen long."""
    sections = (
        _summary(plan),
        objective(plan),
        _decisions(plan),
        _stages(plan),
        time_by_cause(plan.prediction),
        memory_by_cause(plan.prediction),
        _placements(plan),
        _moves(plan),
        _replicated_ops(plan),
        runners_up(plan),
        rejected(plan),
        shadow_prices(plan),
    )
    return "\n\n".join(section for section in sections if section)


def _summary(plan: Plan) -> str:
    certificate, prediction = plan.certificate, plan.prediction
    return "\n".join(
        (
            f"{plan.model.name} ({plan.model.num_parameters / 1e9:.3g} B parameters) "
            f"on {plan.cluster.used(plan.device_mesh().num_ranks)}",
            f"  step {seconds_text(prediction.step_s)}, {prediction.tokens_per_s:,.0f} tokens/s, "
            f"MFU {prediction.mfu:.1%}, fullest rank "
            f"{bytes_text(prediction.fullest.peak_bytes)} of {bytes_text(prediction.usable_bytes)}",
            f"  {certificate.statement} "
            f"({counted(certificate.num_candidates, 'candidates')} bounded, "
            f"{certificate.num_solved} solved, {certificate.solve_s:.1f} s)",
        )
    )


def _order(mesh: Mesh) -> str:
    """Which axes are inside which, where that is not as ever."""
    used = [axis for axis in mesh.axis_order if mesh.size(axis) > 1]
    if used == [axis for axis in MESH_AXES if mesh.size(axis) > 1]:
        return ""
    return f", from the outermost axis on {', '.join(used)}"


def _decisions(plan: Plan) -> str:
    mesh, schedule, training = plan.mesh, plan.schedule, plan.training
    clipping = "off" if training.max_grad_norm is None else f"at {training.max_grad_norm:g}"
    rows = [
        (
            "mesh",
            f"pipeline {mesh.pp} × data {mesh.dp_replicate} (replicate) × {mesh.dp_shard} (shard) "
            + "".join(
                f"× {name} {size} "
                for name, size in (("context", mesh.cp), ("expert", mesh.ep))
                if size > 1
            )
            + f"× tensor {mesh.tp}"
            + _order(plan.device_mesh()),
        ),
        ("batch", _batch(plan)),
        (
            "schedule",
            schedule.name
            + (f" × {schedule.virtual_stages} virtual stages" * (schedule.virtual_stages > 1))
            + f", {schedule.extra_in_flight} more in flight" * (schedule.extra_in_flight > 0)
            + f", loss in {schedule.loss_chunks} chunks" * (schedule.loss_chunks > 1)
            + ", optimizer state offloaded" * schedule.offload_optimizer
            + _offloaded(plan)
            + f", ZeRO stage {zero_text(schedule.zero_stage, schedule.zero_stages)}"
            + f", recompute {_recompute(plan)}"
            + f", kernels {schedule.kernels}" * (schedule.kernels != DEFAULT_KERNELS),
        ),
        (
            "training",
            f"{training.precision}, gradients {training.gradient_dtype} (sent as "
            f"{training.reduce_dtype}), {training.optimizer} (lr {training.learning_rate:g}), "
            f"gradient clipping {clipping}",
        ),
    ]
    if plan.pins:
        rows.append(
            ("pinned", ", ".join(f"{key}={value}" for key, value in sorted(plan.pins.items())))
        )
    return named_rows(rows)


def _batch(plan: Plan) -> str:
    batch, ranks = plan.batch, plan.device_mesh().batch_ranks
    if batch.shares:
        shares = ", ".join(
            f"{share.data_ranks} data ranks × {share.num_micro_batches}" for share in batch.shares
        )
        size = batch.micro_batch_size
        return f"{batch.global_batch_size} sequences in micro-batches of {size}: {shares}"
    text = (
        f"{counted(batch.global_batch_size, 'sequences')} = "
        f"{counted(batch.num_micro_batches, 'micro-batches')} × {batch.micro_batch_size} × "
        f"{counted(ranks, 'data ranks')}"
    )
    last = batch.last_size(ranks)
    return text if last == batch.micro_batch_size else f"{text}, the last micro-batch of {last}"


def _stages(plan: Plan) -> str:
    lines = []
    for stage in range(plan.mesh.pp):
        held = [segment for segment in plan.segments if segment.stage == stage]
        runs = _runs((segment.first_block, segment.last_block) for segment in held)
        again = _listed(plan.schedule.recomputed_blocks, held)
        by_op = _listed(plan.schedule.recomputed_by_op, held)
        offloaded = _listed(plan.schedule.offloaded_blocks, held)
        gathered = _listed(plan.schedule.gathered_again, held)
        lower = _lower_stages(plan, held)
        own = [rank.nodes for rank in plan.prediction.ranks if rank.stage == stage and rank.nodes]
        nodes = " and ".join(own)
        lines.append(
            (
                f"stage {stage}",
                f"blocks {runs} in {counted(len(held), 'segments')}"
                + (f" on {nodes}" if nodes else "")
                + (f", computed again: {again}" if again else "")
                + (f", computed again by op: {by_op}" if by_op else "")
                + (f", activations offloaded: {offloaded}" if offloaded else "")
                + (f", gathered again: {gathered}" if gathered else "")
                + (f", {lower}" if lower else ""),
            )
        )
    return named_rows(lines)


def _recompute(plan: Plan) -> str:
    """What is computed again, with numbers of blocks where the plan lists them."""
    schedule, num = plan.schedule, plan.segments[-1].last_block + 1
    gathered = len(schedule.gathered_again)
    gathers = [f"{gathered} gathered again"] * (gathered > 0)
    if schedule.recompute != "blocks":
        return ", ".join([schedule.recompute, *(f"{text} of {num}" for text in gathers)])
    whole, by_op = len(schedule.recomputed_blocks), len(schedule.recomputed_by_op)
    parts = [f"{whole} whole"] * (whole > 0) + [f"{by_op} by op"] * (by_op > 0) + gathers
    return f"blocks ({', '.join(parts) or 'none'} of {num})"


def _offloaded(plan: Plan) -> str:
    num = len(plan.schedule.offloaded_blocks)
    return f", activations of {num} block{'s' * (num != 1)} offloaded" * (num > 0)


def _lower_stages(plan: Plan, held: Sequence[SegmentPlan]) -> str:
    """Blocks of ``held`` that stay gathered or whose gradients are accumulated whole, where others
    do not, and the seconds of communication that this saves them in a step.
    """
    if not plan.schedule.zero_stages:
        return ""
    stages, costs = block_zero_stages(plan), plan.prediction.action_costs
    highest = max(stages)
    num = 1 if plan.schedule.name == "layered" else plan.batch.num_micro_batches
    texts: list[str] = []
    for level, what in ((2, "gathered once"), (1, "gradients reduced once")):
        lower = [part for part in held if stages[part.first_block] <= level < highest]
        if not lower:
            continue
        text = f"{what}: {_runs((part.first_block, part.last_block) for part in lower)}"
        if costs is not None:
            own = [costs.segments[plan.segments.index(part)] for part in lower]
            saved = (
                (2 * num - 1) * sum(cost.gather_s for cost in own)
                if level == 2
                else (num - 1) * sum(cost.reduce_s for cost in own)
            )
            text += f" (up to {seconds_text(saved)} of communication less)"
        texts.append(text)
    return ", ".join(texts)


def _listed(blocks: Sequence[int], held: Sequence[SegmentPlan]) -> str:
    """Those of ``blocks`` that are in ``held``."""
    listed = frozenset(blocks)
    blocks = [
        block
        for segment in held
        for block in range(segment.first_block, segment.last_block + 1)
        if block in listed
    ]
    return _runs((block, block) for block in blocks)


def time_by_cause(prediction: Prediction) -> str:
    """Where the seconds of a step go, on the stage that waits least for others."""
    critical = prediction.critical
    return _by_cause(
        f"time of a step (stage {critical.stage})",
        [
            (cause, seconds, seconds_text(seconds))
            for cause, seconds in critical.seconds_by_cause.items()
        ],
    )


def memory_by_cause(prediction: Prediction) -> str:
    """What fills the memory of the fullest rank."""
    fullest, beside = prediction.fullest, ""
    if fullest.host_bytes:
        beside = f"; {bytes_text(fullest.host_bytes)} more on its host"
    return _by_cause(
        f"memory of the fullest rank (stage {fullest.stage}){beside}",
        [(cause, num, bytes_text(num)) for cause, num in fullest.bytes_by_cause.items()],
    )


def _by_cause(title: str, causes: Iterable[tuple[str, float, str]]) -> str:
    told = list(causes)
    total = sum(amount for _, amount, _ in told)
    present = sorted((c for c in told if c[1] > _ROUNDING * total), key=lambda cause: -cause[1])
    if not present:
        return ""
    return "\n".join(
        (
            title,
            named_rows(
                [(name, f"{text:>10}  {amount / total:5.1%}") for name, amount, text in present]
            ),
        )
    )


def _placements(plan: Plan) -> str:
    """How parameters are sharded over the tensor axis, and which are over the expert axis; like
    ones grouped.
    """
    parts: list[str] = []
    for axis, name in (("ep", "expert"), ("tp", "tensor")):
        if axis not in plan.layout_axes or getattr(plan.mesh, axis) == 1:
            continue
        index = plan.layout_axes.index(axis)
        rows = _grouped_states(plan, index, only_sharded=axis == "ep")
        parts.append("\n".join((f"parameters on the {name} axis", named_rows(rows))))
    return "\n\n".join(parts)


def _grouped_states(plan: Plan, axis: int, *, only_sharded: bool) -> list[tuple[str, str]]:
    """State and name of parameters, those of all layers together."""
    grouped: dict[tuple[str, str], int] = {}
    for name, parameter in plan.parameters.items():
        state = parameter.placement[axis]
        if only_sharded and not state.startswith("S"):
            continue
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        grouped[pattern, state] = grouped.get((pattern, state), 0) + 1
    return [
        (state, f"{pattern}{f'  ×{count}' if count > 1 else ''}")
        for (pattern, state), count in grouped.items()
    ]


def _moves(plan: Plan) -> str:
    traffic = [move for move in plan.moves if (move.forward, move.backward) != ("none", "none")]
    if not traffic:
        return ""
    rows = [
        (
            move.kind,
            f"{move.value}: {move.source} → {move.target} on {move.axis}: "
            f"{move.forward.replace('_', '-')} forward, {move.backward.replace('_', '-')} "
            f"backward, {move.bytes / 2**20:.1f} MiB",
        )
        for move in traffic
    ]
    return "\n".join(("collectives of a micro-batch", named_rows(rows)))


def _replicated_ops(plan: Plan) -> str:
    if not plan.replicated_ops:
        return ""
    rows = [
        (
            found.op,
            f"×{found.count}, {seconds_text(found.seconds)} a step, "
            f"{found.source or 'unknown line'}",
        )
        for found in plan.replicated_ops
    ]
    title = "ops without a rule: every rank computes them whole"
    return "\n".join((title, named_rows(rows)))


def _runs(ranges: Iterable[tuple[int, int]]) -> str:
    merged: list[tuple[int, int]] = []
    for first, last in ranges:
        if merged and merged[-1][1] + 1 == first:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in merged)
