"""What the candidates of a model cost on a cluster: their settings, stages and cuts."""

from __future__ import annotations

import math

from autopar.solver.bounds import StageTimes, exact_times
from autopar.solver.candidates import Candidate
from autopar.solver.chunk_choice import ChunkChoice
from autopar.solver.costs.memory import Itemsizes
from autopar.solver.cuts import best_cuts, layer_cuts
from autopar.solver.data_axis import DataAxis
from autopar.solver.facts import BlockCosts
from autopar.solver.hardware import Cluster
from autopar.solver.layout.model_facts import ModelFacts
from autopar.solver.layout.problem import Solution
from autopar.solver.mixed import AnySetting
from autopar.solver.schedule_bounds import stage_bounds
from autopar.solver.setting_store import SettingStore
from autopar.solver.stages import Stager
from autopar.solver.virtual_cuts import virtual_cuts


class Pricer:
    """Prices the candidates of a model on a cluster, with elements of so many bytes."""

    def __init__(self, facts: ModelFacts, cluster: Cluster, sizes: Itemsizes) -> None:
        self.facts, self.cluster, self.sizes = facts, cluster, sizes
        self.settings = SettingStore(facts, cluster, sizes.reduce)
        self.data_axis = DataAxis(facts=facts, cluster=cluster.groups[0])
        self._virtual_cuts: dict[Candidate, tuple[tuple[int, ...], ...]] = {}  # of ZeRO 0

    def setting(self, candidate: Candidate) -> AnySetting:
        """What a candidate's layout depends on."""
        return self.settings.of(candidate)

    def stager(self, candidate: Candidate, costs: BlockCosts) -> Stager:
        """The stages of a candidate whose blocks cost so much."""
        return Stager(self.cluster, candidate, costs, self.sizes)

    def least_times(self, candidate: Candidate) -> StageTimes:
        """Below every layout of the candidate."""
        setting = self.setting(candidate)
        times = setting.part_times if candidate.has_parts else setting.least_times
        return times(candidate.recompute)

    def layout_stager(
        self, candidate: Candidate, setting: AnySetting, solution: Solution
    ) -> Stager:
        """With the costs of a layout, those of the data axis included, and the loss whole."""
        return self.stager(candidate, self._with_data_axis(candidate, setting.costs(solution)))

    def chunk_choice(
        self, candidate: Candidate, setting: AnySetting, solution: Solution
    ) -> ChunkChoice:
        """The same with the loss in any number of chunks."""

        def costs(num_chunks: int) -> BlockCosts | None:
            found = setting.chunked_costs(
                solution, num_chunks, self.data_axis.typing(), candidate, self.sizes
            )
            return None if found is None else self._with_data_axis(candidate, found)

        whole = self.layout_stager(candidate, setting, solution)
        return ChunkChoice(whole=whole, costs=costs, block=self.facts.loss_block)

    def decided_stager(
        self, candidate: Candidate, setting: AnySetting, solution: Solution
    ) -> Stager:
        """With the chunks of the loss that the candidate says; whole where they cannot be."""
        choice = self.chunk_choice(candidate, setting, solution)
        return choice.pinned() or choice.whole

    def only_choice(self, candidate: Candidate) -> ChunkChoice:
        """With the fastest layout."""
        setting = self.setting(candidate)
        return self.chunk_choice(candidate, setting, setting.solution(candidate.recompute))

    def cuts(
        self, candidate: Candidate, stager: Stager, times: StageTimes | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Cuts to try: the best by the bounds, if any fit, or some for virtual stages."""
        if candidate.cuts == "even":
            num = candidate.pp * candidate.virtual_stages
            return (layer_cuts(self.facts.model, num),)
        if candidate.virtual_stages > 1:
            alike = candidate.of_any_zero
            if alike not in self._virtual_cuts:
                whole = self.stager(candidate, self.setting(candidate).whole)
                self._virtual_cuts[alike] = virtual_cuts(whole)
            return self._virtual_cuts[alike]
        times = exact_times(stager) if times is None else times
        bounds = stage_bounds(stager, times)
        bound, cuts = best_cuts(bounds, bounds.reach)
        return (cuts,) if math.isfinite(bound) else ()

    def _with_data_axis(self, candidate: Candidate, costs: BlockCosts) -> BlockCosts:
        return self.data_axis.add_undivided(
            costs,
            candidate.sites(self.cluster),
            dp=candidate.dp,
            stride=candidate.data_stride,
            micro_batch_size=candidate.micro_batch_size,
        )
