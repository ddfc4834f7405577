"""Bounds that many candidates share: every candidate has them, before all that takes long."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from autopar.solver.candidates import Candidate
from autopar.solver.pricer import Pricer
from autopar.solver.runs import rounds_of
from autopar.solver.schedule_bounds import any_order_s, scalar_bound_s
from autopar.solver.stages import Stager
from autopar.solver.virtual_cuts import compute_bound_s, least_cut_bound_s


class CheapBounds:
    """Steps 0 and 1 of ``refinement``; what is asked for twice is worked out once."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self._too_large: dict[tuple[object, ...], int] = {}  # by degrees: what never fits
        self._rough: dict[tuple[object, ...], float] = {}
        self._scalar: dict[Candidate, float] = {}
        self._fits: dict[tuple[object, ...], bool] = {}
        self._compute: dict[Candidate, float] = {}  # by candidates of ZeRO 0

    def rough(self, candidate: Candidate) -> float:
        """Of all candidates with its degrees and micro-batches; infinite for what fits nowhere."""
        number = candidate.num_micro_batches
        key = (candidate.pp, candidate.dp, number, candidate.setting_key, candidate.group_order)
        known = self._rough.get(key)
        if known is None:
            known = self._rough[key] = self._rough_s(candidate)
        return known

    def _rough_s(self, candidate: Candidate) -> float:
        if candidate.way.recompute != "none":
            return self.rough(_keeping_ops(candidate))
        degrees = (candidate.cp, candidate.ep, candidate.tp, candidate.way, candidate.group_order)
        if candidate.micro_batch_size >= self._too_large.get(degrees, math.inf):
            return math.inf
        setting = self.pricer.setting(candidate)
        if setting.never_fits(self.pricer.cluster):
            self._too_large[degrees] = candidate.micro_batch_size
            return math.inf
        forward = setting.least.forward_s
        return any_order_s(candidate, forward, forward + setting.least.backward_s)

    def scalar(self, candidate: Candidate, enough_s: float = math.inf) -> float:
        """``scalar_bound_s`` at the fastest layout of each kind."""
        known = self._scalar.get(candidate)
        if known is None:
            known = self._scalar[candidate] = self._scalar_s(candidate, enough_s)
        return known

    def _scalar_s(self, candidate: Candidate, enough_s: float) -> float:
        if candidate.way.recompute != "none":
            keeping_s = self.scalar(_keeping_ops(candidate), enough_s)
            if keeping_s > enough_s:  # the setting of its own need not be made
                return keeping_s
        bound = self._compute_s(candidate) if candidate.virtual_stages > 1 else 0.0
        if bound > enough_s:
            return bound
        pricer = self.pricer
        stager = pricer.stager(candidate, pricer.setting(candidate).least)
        if not self._may_fit(stager):
            return math.inf
        times = pricer.least_times(candidate).plus_backward(stager.adding_s())
        bound = max(bound, scalar_bound_s(candidate, times))
        if candidate.virtual_stages > 1:
            cuts = pricer.cuts(candidate, stager)
            fitting = stager.least_cuts_fit(rounds_of(cuts, candidate.pp))
            cuts = tuple(itertools.compress(cuts, fitting.tolist()))
            if not cuts:
                return math.inf
            bound = max(bound, least_cut_bound_s(stager, times, cuts, memory=False))
        return bound

    def _may_fit(self, stager: Stager) -> bool:
        """``stager.may_fit``, asked once for candidates that are alike for it."""
        candidate = stager.candidate
        key = (
            *(candidate.pp, candidate.dp, candidate.num_shards, candidate.zero_stage),
            *(candidate.num_micro_batches if candidate.schedule == "layered" else 0,),
            *(candidate.recompute, candidate.group_order, candidate.zero_stages),
            *(candidate.offload_optimizer, candidate.offload_activations),
            candidate.setting_key,
        )
        if key not in self._fits:
            self._fits[key] = stager.may_fit()
        return self._fits[key]

    def _compute_s(self, candidate: Candidate) -> float:
        """``compute_bound_s`` of a candidate with virtual stages, shared by those alike."""
        alike, pricer = candidate.deepest.of_any_zero, self.pricer
        known = self._compute.get(alike)
        if known is None:
            stager = pricer.stager(candidate, pricer.setting(candidate).least)
            times = pricer.least_times(candidate).plus_backward(stager.adding_s())
            known = compute_bound_s(stager, times, pricer.cuts(candidate, stager))
            self._compute[alike] = known
        return known


def _keeping_ops(candidate: Candidate) -> Candidate:
    """A candidate that takes no more time and no more memory than one that computes ops again."""
    return replace(candidate, recompute="blocks")
