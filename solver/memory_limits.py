"""Limits for the integer program: what the layout of a candidate may keep on each stage."""

from __future__ import annotations

import numpy as np

from autopar.ir.loss_region import LossKind
from autopar.solver.candidates import Candidate
from autopar.solver.in_flight import in_flight
from autopar.solver.layout.problem import MemoryLimit
from autopar.solver.mixed import AnySetting
from autopar.solver.pricer import Pricer
from autopar.solver.stages import Stager


def memory_limits(
    pricer: Pricer, candidate: Candidate, setting: AnySetting
) -> tuple[MemoryLimit, ...] | None:
    """One for each stage, at the cuts that the least costs allow; None where none fit."""
    stager = pricer.stager(candidate, setting.least)
    found = pricer.cuts(candidate, stager, setting.roofline_times(candidate.recompute))
    if not found:
        return None
    cuts = min(found, key=stager.most_missing)
    return tuple(_stage_limit(stager, setting, stage, cuts) for stage in range(candidate.pp))


def _stage_limit(
    stager: Stager, setting: AnySetting, stage: int, cuts: tuple[int, ...]
) -> MemoryLimit:
    """What is left for kept tensors once all else has its least."""
    candidate, facts = stager.candidate, setting.facts
    runs = stager.virtual_stages(stage, cuts)
    blocks = np.concatenate([np.arange(first, last + 1) for first, last in runs])
    causes = stager.bytes_by_cause(stage, cuts)
    share = 1 + stager.sites.memory[stage].fragmentation
    least = stager.costs.held_bytes[blocks]
    once = setting.least.again(candidate.recompute)[blocks]
    lengths = [last + 1 - first for first, last in runs]
    moments = np.repeat(in_flight(candidate, stage), lengths, axis=1)
    flying = moments[np.argmax(moments @ (least * (1 - once)))]
    counted = float((least * once).max() + (least * (1 - once)) @ flying)
    rest = sum(causes.values()) - counted * share
    copies, in_chunks = [], None
    if setting.loss_chunks != 1 and isinstance(facts.loss, LossKind):
        in_chunks = facts.loss.kind.name
    for name in setting.problem.kinds:
        own = [facts.model.blocks[block].kind == name for block in blocks]
        if name == in_chunks:
            copies.append(0.0)  # what it keeps is no longer what the problem says
            continue
        kept = float(((1 - once) * flying)[own].sum())
        copies.append(kept + any(once[own]))
    return MemoryLimit(
        name=f"stage {stage}",
        num_bytes=int((int(stager.sites.usable_bytes[stage]) - rest) / share),
        copies=tuple(copies),
        parameter_bytes=(0.0,) * len(setting.problem.classes),
    )
