"""What a plan predicts of a step: seconds and bytes of each stage's ranks, by cause."""

from __future__ import annotations

import functools

import numpy as np

from autopar.ir.graph import ModelGraph, Size, evaluate
from autopar.ir.plan import (
    WAITING,
    ActionCosts,
    Prediction,
    RankPrediction,
    SegmentCosts,
    TrainingPlan,
    fullest_of,
)
from autopar.solver.candidates import Candidate
from autopar.solver.costs.work import computing_nodes, forward_work, global_shapes, op_flops
from autopar.solver.hardware import Cluster
from autopar.solver.runs import on_stage
from autopar.solver.solved import Solved, optimizer_s


def predict(
    solved: Solved,
    model: ModelGraph,
    cluster: Cluster,
    training: TrainingPlan,
    *,
    global_batch_size: int,
    seq_len: int | None,
) -> Prediction:
    """The prediction of a solved candidate."""
    candidate = solved.candidate
    num_gpus = candidate.mesh().num_ranks
    flops = model_flops(model, global_batch_size)
    used = cluster.reordered(candidate.group_order)
    peak_flops = used.peak_flops(training.precision, num_gpus=num_gpus)
    ranks = rank_predictions(solved)
    fullest = fullest_of(ranks)
    usable = fullest.usable_bytes or int(solved.stager.sites.usable_bytes[fullest.stage])
    return Prediction(
        step_s=solved.step_s,
        mfu=flops / (peak_flops * solved.step_s),
        tokens_per_s=global_batch_size * (seq_len or 1) / solved.step_s,
        model_flops=flops,
        usable_bytes=usable,
        ranks=ranks,
        action_costs=_action_costs(solved),
        beside=tuple(map(_action_costs, solved.beside)),
    )


def rank_predictions(solved: Solved) -> tuple[RankPrediction, ...]:
    """Of each stage's ranks; with unequal shares of the batch, of those of each group of nodes."""
    return tuple(
        _rank(own, stage, solved.candidate)
        for own in solved.beside or (solved,)
        for stage in range(own.candidate.pp)
    )


def model_flops(model: ModelGraph, batch: int) -> float:
    """FLOPs of a step's forwards and backwards, nothing repeated.

    By the custom of the field: causal attention counts like full attention, and its backward
    twice its forward, whatever the kernel repeats.
    """
    return float(evaluate(sum(_model_flops(model)), batch))


def product_flops(model: ModelGraph, batch: int) -> float:
    """FLOPs of a step without those of attention kernels, which may skip some: no step has less."""
    return float(evaluate(_model_flops(model)[0], batch))


@functools.lru_cache(maxsize=8)
def _model_flops(model: ModelGraph) -> tuple[Size, Size]:
    """By the batch, without and of attention: summed once for the many layouts of a model."""
    products: Size = 0
    attentions: Size = 0
    counts = model.multiplicity()
    for name, kind in model.kinds.items():
        for node in computing_nodes(kind):
            attention = forward_work(node, *global_shapes(node)).attention
            if attention is None:
                products = products + counts[name] * sum(op_flops(node))
                continue
            query, key = global_shapes(node)[0][:2]
            full = 4 * key[-2]
            for size in query:
                full = full * size
            attentions = attentions + counts[name] * 3 * full
    return products, attentions


def _action_costs(solved: Solved) -> ActionCosts:
    times, slowdowns = solved.times, solved.stager.sites.slowdown.tolist()
    return ActionCosts(
        segments=tuple(
            SegmentCosts(
                forward_s=times.forward_s[k],
                backward_s=times.backward_s[k],
                gather_s=times.gather_s[k],
                reduce_s=times.reduce_s[k],
                send_s=times.send_s[k],
                held_bytes=times.held_bytes[k],
                weight_s=times.weight_s[k] if times.weight_s else 0.0,
                weight_bytes=times.weight_bytes[k] if times.weight_bytes else 0,
                copy_s=times.copy_s[k] if times.copy_s else 0.0,
            )
            for k in range(len(solved.segments))
        ),
        optimizer_s=optimizer_s(solved.stager, solved.segments),
        slowdown=max(slowdowns),
        slowdowns=tuple(slowdowns) if len(set(slowdowns)) > 1 else (),
    )


_ROUNDING = 1e-12
"""Sums of a stage's seconds in another order differ by a smaller share."""


def _rank(solved: Solved, stage: int, whole: Candidate) -> RankPrediction:
    """Of one stage's ranks of a candidate, or of its part on a group of nodes."""
    candidate, stager, costs = solved.candidate, solved.stager, solved.stager.costs
    runs, sites = stager.virtual_stages(stage, solved.cuts), stager.sites
    num = candidate.num_micro_batches

    def total(values: np.ndarray) -> float:
        own = on_stage(values, stage)
        return float(sum(own[first : last + 1].sum() for first, last in runs))

    comm = total(costs.forward_comm_s) + total(costs.backward_comm_s)
    forward = total(costs.forward_s)
    compute = forward + total(costs.backward_s) - comm
    again = total(stager.again_s())
    adding = total(stager.adding_s())
    optimizer, copying = optimizer_s(stager, solved.segments)[stage], total(stager.copying_s())
    simulation, inline = solved.simulation, total(stager.inline_copy_s())
    busy, exposed = simulation.busy_s[stage], simulation.exposed_s[stage]
    own = num * (compute + comm + again + adding + inline) + optimizer
    slowed = busy - own
    seconds = {
        "compute": num * compute,
        "communication in layers": num * comm,
        "recomputation": num * again,
        "adding gradients": num * adding,
        "optimizer": optimizer - copying,
        "copies of optimizer state": copying,
        "copies of activations": num * inline + simulation.copying_s[stage],
        "exposed data-parallel communication": exposed,
        "slowdown by hidden communication": slowed if slowed > _ROUNDING * busy else 0.0,
        WAITING: max(0.0, solved.step_s - busy - exposed - simulation.copying_s[stage]),
    }
    causes = stager.bytes_by_cause(stage, solved.cuts)
    is_mixed = bool(whole.group_order)
    num_ranks = whole.ranks_per_stage
    if whole.shares:
        num_ranks = stager.cluster.num_gpus
    return RankPrediction(
        stage=stage,
        num_ranks=num_ranks,
        peak_bytes=sum(causes.values()),
        bytes_by_cause=causes,
        seconds_by_cause=seconds,
        nodes=sites.names(stage) if is_mixed else None,
        usable_bytes=int(sites.usable_bytes[stage]) if is_mixed else None,
        host_bytes=stager.host_bytes(stage, solved.cuts),
    )
