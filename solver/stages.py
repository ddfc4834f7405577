"""What runs of blocks cost as stages of a candidate: seconds and bytes of every run at once.

Sums over runs are differences of prefix sums, so that a candidate with 82 blocks and 64 stages
takes milliseconds. Seconds are one number for each block, or, where stages are on nodes of
different kinds, a row of them for each stage (``sites``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.ir.mesh import CONTEXT_AXIS, EXPERT_AXIS, REPLICATE_AXIS, SHARD_AXIS, TENSOR_AXIS
from autopar.ir.moves import Collective
from autopar.ir.offload import ACTIVATION_BUFFERS
from autopar.solver.candidates import Candidate
from autopar.solver.costs.comm import Group, Links
from autopar.solver.costs.memory import (
    Elements,
    Itemsizes,
    Segments,
    StageContents,
    rank_bytes,
    resident_bytes,
    shard_numel,
    state_buffer_bytes,
)
from autopar.solver.costs.parameters import ParameterCosts
from autopar.solver.facts import BlockCosts, Floats, PartCosts
from autopar.solver.hardware import Cluster
from autopar.solver.in_flight import in_flight, in_parts
from autopar.solver.reach import Floor
from autopar.solver.runs import Bools, Ints, Rounds, Runs, prefixes
from autopar.solver.sites import Border, Sites, border_between

ROUNDED_BYTES = 16
"""Each cause of ``bytes_by_cause`` is rounded down: no sum of them is so much below the account."""

_ABOVE = 1 + 1e-9
"""Rounding makes nothing too large."""

ManyElements = tuple[Floats, Floats]
"""``Elements`` of many runs: all, and those of experts."""


@dataclass(frozen=True, eq=False)
class Stager:
    """Costs of stages of one candidate, from the costs of its blocks.

    Where a candidate leaves open which blocks have their activations offloaded, methods of cuts and
    of runs decide it (``decided``), and others say the least: all of them have, for nothing.
    """

    cluster: Cluster
    candidate: Candidate
    costs: BlockCosts
    sizes: Itemsizes

    @functools.cached_property
    def sites(self) -> Sites:
        """On which nodes its stages are."""
        return self.candidate.sites(self.cluster)

    @functools.cached_property
    def zero_stages(self) -> Ints:
        """The ZeRO stage of each block; where that is open, the one of the least memory."""
        candidate = self.candidate
        return np.array(candidate.zero_stages or [candidate.zero_stage] * self.costs.num_blocks)

    @functools.cached_property
    def _buffered_stages(self) -> Ints:
        """The same for what a stage has buffers of: where it is open, at the least none."""
        return self.zero_stages * (0 if self.candidate.zero_open else 1)

    @functools.cached_property
    def regathered(self) -> Floats:
        """1 for blocks that are gathered for each use. Where that is open none are, which takes
        least time.
        """
        return (0 if self.candidate.zero_open else 1) * (self.zero_stages == 3).astype(np.float64)

    @functools.cached_property
    def reduced_each(self) -> Floats:
        """The same of blocks whose gradients are reduced after each micro-batch, if the order is
        not layered.
        """
        reduced = not self.candidate.zero_open and self.candidate.schedule != "layered"
        return reduced * (self.zero_stages >= 2).astype(np.float64)

    def virtual_stages(self, stage: int, cuts: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """First and last block of each virtual stage of a stage, one of ``candidate``'s each.

        ``cuts`` has the first block of every virtual stage, then the number of blocks. Virtual
        stage c is on stage c mod p.
        """
        numbers = range(stage, len(cuts) - 1, self.candidate.pp)
        return tuple((cuts[number], cuts[number + 1] - 1) for number in numbers)

    # Seconds

    def backward_s(self) -> Floats:
        """Backward of each block, with what it does again, and with gradients added to those of the
        micro-batches before.
        """
        return self.costs.backward_s + self.again_s() + self.adding_s() + self.inline_copy_s()

    def again_s(self) -> Floats:
        """Of ``backward_s``, the forward or the parts of it that a block does again."""
        found = self.costs.forward_s * self.again()
        for part, is_done in self._parts:
            found = found + part.again_s * is_done
        return found

    def weight_s(self) -> Floats:
        """Of ``backward_s``, the weight part of a backward in two parts."""
        weight = self.costs.weight_s
        return np.where(weight > 0, weight + self.adding_s(), 0.0)

    def adding_s(self) -> Floats:
        """Seconds in which each block's gradients are added to those of earlier micro-batches."""
        return self.sites.most(
            lambda cluster: ParameterCosts(cluster.hardware, self.sizes).adding_s(
                self.costs.num_parameters,
                self.costs.shared_numel,
                num_micro_batches=self.candidate.num_micro_batches,
            )
        )

    def gather_s(self) -> Floats:
        """Seconds of gathering the parameters of each block over the shard axis."""
        return self._gather_s

    def reduce_s(self) -> Floats:
        """Seconds of reducing the gradients of each block over the data axes."""
        return self._reduce_s

    @functools.cached_property
    def _gather_s(self) -> Floats:
        return self._traffic_s("gather", lambda own: own.sites.most(own._gather_on_s))

    @functools.cached_property
    def _reduce_s(self) -> Floats:
        return self._traffic_s("reduce", lambda own: own.sites.most(own._reduce_on_s))

    def _traffic_s(self, name: str, seconds: Callable[[Stager], Floats]) -> Floats:
        """Of gathers or reductions, at the least of the placements that are open; what shares costs
        of blocks and the mesh has the same.
        """
        known, candidate = self.costs.known_traffic, self.candidate
        mesh = candidate.pp, candidate.dp_replicate, candidate.dp_shard, candidate.axis_order
        is_sharded, order = candidate.zero_stage > 0, candidate.group_order
        key = (name, self.cluster, is_sharded, order, *mesh, candidate.placements)
        if key not in known:
            found = [seconds(replace(self, candidate=own)) for own in candidate.members()]
            known[key] = functools.reduce(np.minimum, found)
        return known[key]

    def _gather_on_s(self, cluster: Cluster) -> Floats:
        gathering = self._collective_s(cluster, Collective.ALL_GATHER, self.sizes.compute)
        if self.candidate.zero_stage == 0 or self.candidate.num_shards == 1:
            return gathering
        costs = ParameterCosts(cluster.hardware, self.sizes)
        return gathering + costs.copying_s(self.costs.num_parameters, self.costs.numel)

    def _reduce_on_s(self, cluster: Cluster) -> Floats:
        candidate, itemsize = self.candidate, self.sizes.reduce
        if candidate.zero_stage == 0:
            return self._collective_s(cluster, Collective.ALL_REDUCE, itemsize)
        scattered = self._collective_s(cluster, Collective.REDUCE_SCATTER, itemsize)
        if candidate.dp_replicate == 1:
            return scattered
        group = candidate.group(cluster, (REPLICATE_AXIS,))
        num_bytes = self._shard_numel(self.costs.numel, self.costs.expert_numel) * itemsize
        return scattered + _seconds_of(Links(cluster), Collective.ALL_REDUCE, num_bytes, group)

    def _collective_s(self, cluster: Cluster, collective: Collective, itemsize: int) -> Floats:
        """Of the parameters that context and expert ranks share, and of the experts apart."""
        candidate = self.candidate
        if candidate.zero_stage == 0 and collective is Collective.ALL_GATHER:
            return np.zeros(self.costs.num_blocks)
        axes: tuple[str, ...] = (SHARD_AXIS, CONTEXT_AXIS)
        if candidate.zero_stage == 0:
            axes = (REPLICATE_AXIS, *axes)
        links, experts = Links(cluster), self.costs.expert_numel * itemsize
        group = candidate.group(cluster, (*axes, EXPERT_AXIS))
        total = _seconds_of(links, collective, self.costs.numel * itemsize - experts, group)
        if not experts.any():
            return total
        return total + _seconds_of(links, collective, experts, candidate.group(cluster, axes))

    def _shard_numel(self, numel: Floats, expert_numel: Floats) -> Floats:
        """Elements of a rank's ZeRO shards."""
        candidate = self.candidate
        return shard_numel(numel, expert_numel, num_shards=candidate.num_shards, ep=candidate.ep)

    def sharded_numel(self) -> Floats:
        """Elements of a rank's shards of the parameters of each block."""
        return self._shard_numel(self.costs.shared_numel, self.costs.shared_expert_numel)

    def optimizer_s(self) -> Floats:
        """Seconds of clipping and the optimizer on the parameters of each block."""
        return self._optimizer_s

    @functools.cached_property
    def _optimizer_s(self) -> Floats:
        numel = self._updated(self.costs.numel, self.costs.expert_numel)
        num = self.costs.num_first_parameters

        def seconds(cluster: Cluster) -> Floats:
            costs = ParameterCosts(cluster.hardware, self.sizes)
            if not self.candidate.offload_optimizer:
                return costs.update_s(num, numel)
            return costs.offloaded_update_s(num, numel, ranks=cluster.gpus_per_node)

        return self.sites.most(seconds)

    def copying_s(self) -> Floats:
        """Of ``optimizer_s``, what offloading adds to it."""
        resident = replace(self.candidate, offload_optimizer=False)
        return self.optimizer_s() - replace(self, candidate=resident).optimizer_s()

    def copy_s(self) -> Floats:
        """Seconds of copying what a micro-batch keeps of each block to the host, or back, while all
        ranks of a node do the same; 0 where it is not offloaded.
        """
        return self._copied_s(self._is_listed)

    def inline_copy_s(self) -> Floats:
        """Of ``backward_s``: both copies, where the host itself computes, and is what copies."""
        is_host = np.array([cluster.hardware.device == "cpu" for cluster in self.sites.clusters])
        if not self._is_listed.any() or not is_host.any():
            return np.zeros(self.costs.num_blocks)
        return self.sites.most(
            lambda cluster: (
                2 * self._copied_on_s(cluster, self._is_listed) * (cluster.hardware.device == "cpu")
            )
        )

    def run_copy_s(self, runs: Runs) -> Floats | float:
        """``copy_s`` of all of a run, of a micro-batch."""
        if not self.candidate.offload_activations:
            return 0.0
        if not self.candidate.leaves_offloaded_open:
            return runs.sums(self.copy_s())
        return self._offloaded_part(runs).sums(self._copied_s(self.offloadable()))

    def _copied_s(self, part: Floats) -> Floats:
        """Beside compute, of the blocks of a part."""
        if not part.any():
            return np.zeros(self.costs.num_blocks)
        return self.sites.most(
            lambda cluster: self._copied_on_s(cluster, part) * (cluster.hardware.device != "cpu")
        )

    def _copied_on_s(self, cluster: Cluster, part: Floats) -> Floats:
        speed = cluster.hardware.host_link.rank_bytes_per_s(cluster.gpus_per_node)
        return part * self.costs.held_bytes / speed

    def once_s(self) -> Floats:
        """Seconds of the optimizer and of reductions over the tensor axis, once a step."""
        return self.optimizer_s() + self.costs.step_s

    def border_s(self, block: int, border: int) -> float:
        """Seconds until what passes from before ``block`` to it and after is on the next stage."""
        return float(self._borders(border)[block])

    def borders_s(self, cuts: Ints) -> Floats:
        """The same of the first blocks of stages or virtual stages: of each choice of cuts, a row
        with a number for each border.
        """
        borders = [number % self.candidate.pp for number in range(cuts.shape[1])]
        ways = [self._ways_over[border] for border in borders]
        kinds = {way: self._borders(border) for border, way in zip(borders, ways, strict=True)}
        if not kinds:
            return np.zeros(cuts.shape)
        places = list(kinds)
        found: Floats = np.stack(list(kinds.values()))[[places.index(way) for way in ways], cuts]
        return found

    @functools.cached_property
    def _ways_over(self) -> tuple[tuple[tuple[Border, int], ...], ...]:
        """For each border what a message goes through, and how many ranks are between two with the
        same place on neighboring stages: of each placement that is open.
        """
        candidate, found = self.candidate, list[tuple[tuple[Border, int], ...]]()
        strides = sorted({own.stage_stride for own in candidate.members()})
        for stage in range(candidate.pp):
            borders = {
                border_between(
                    self.sites,
                    stage,
                    pp=candidate.pp,
                    stride=stride,
                    outermost=stride == candidate.ranks_per_stage,
                ): stride
                for stride in strides
            }
            found.append(tuple(borders.items()))
        return tuple(found)

    def _borders(self, border: int) -> Floats:
        """Of every block; what shares costs of blocks, tensor ranks and ways over a border has the
        same.
        """
        known = self.costs.known_borders
        key = (self._ways_over[border], self.candidate.tp, self.candidate.layout_strides)
        if key not in known:
            pairs = list(
                zip(self.costs.sent_bytes.tolist(), self.costs.gathered_bytes.tolist(), strict=True)
            )
            seconds = {pair: self._border_s(*pair, border) for pair in set(pairs)}
            known[key] = np.array([seconds[pair] for pair in pairs])
        return known[key]

    def _border_s(self, sent: float, gathered: float, border: int) -> float:
        gather_s = max(
            Links(cluster).seconds(
                Collective.ALL_GATHER, gathered, self.candidate.group(cluster, (TENSOR_AXIS,))
            )
            for cluster in self.sites.borders[border].site
        )
        return self.message_s(sent, border) + gather_s

    def message_s(self, num_bytes: float, border: int) -> float:
        """Seconds of a message of a rank from stage ``border`` to the next."""
        return min(
            max(
                Links(cluster).message_seconds(
                    num_bytes,
                    crosses_nodes=place.crosses_nodes,
                    sharing=min(stride, cluster.gpus_per_node),
                )
                for cluster in place.site
            )
            for place, stride in self._ways_over[border]
        )

    # Bytes

    def contents(self, stage: int, cuts: Sequence[int]) -> StageContents:
        """What a stage holds; for ``cuts`` see ``virtual_stages``."""
        candidate, costs = self.candidate, self.costs
        runs = self.virtual_stages(stage, cuts)
        own = np.concatenate([np.arange(first, last + 1) for first, last in runs])
        segments = costs.shared_numel[own]
        if not candidate.per_block:
            each = [self._elements(np.arange(first, last + 1)) for first, last in runs]
            segments = np.array([elements.all for elements in each])
        zero = self._buffered_stages[own if candidate.per_block else [i for i, _ in runs]]
        parameters = self._elements(own)

        def part(is_part: Bools) -> Elements:
            return parameters if is_part.all() else self._elements(own[is_part])

        borders = np.append(costs.border_bytes, 0.0)
        return StageContents(
            parameters=parameters,
            kept=part(self.zero_stages[own] <= 2),
            summed=part(self.zero_stages[own] <= 1),
            segment_numel=float(segments.max()),
            block_updated=float(self._block_updated[own].max()),
            regathered=_segments(segments[zero == 3]),
            scattered=_segments(segments[zero >= 2]),
            overlap=self._overlaps(stage),
            activation_bytes=float(self.moments(stage, cuts).kept_bytes.max()),
            recompute_bytes=float(self.rebuilt_bytes()[own].max()),
            temporary_bytes=float(costs.temporary_bytes[own].max()),
            message_bytes=max(2.0 * float(borders[i] + borders[j + 1]) for i, j in runs),
            offload_bytes=self._offload_buffers(own, stage),
        )

    def _offload_buffers(self, own: Ints, stage: int) -> float:
        """Bytes on the device of what offloaded forwards keep."""
        held = self.costs.held_bytes[own] * self._is_listed[own]
        most = np.count_nonzero(held) * float(self.flying[stage])
        return float(held.max(initial=0.0)) * min(ACTIVATION_BUFFERS, most)

    def moments(self, stage: int, cuts: Sequence[int]) -> Moments:
        """The fullest moments of a stage; for ``cuts`` see ``virtual_stages``."""
        candidate, costs, runs = self.candidate, self.costs, self.virtual_stages(stage, cuts)
        first_kept, kept = self._kept
        held = np.array(
            [first_kept[first] + kept[first + 1 : last + 1].sum() for first, last in runs]
        )
        numbers, waited = in_flight(candidate, stage), 0.0
        if candidate.schedule == "zero_bubble":
            waiting = [costs.waiting_bytes[first : last + 1].sum() for first, last in runs]
            numbers, parts = np.split(in_parts(candidate, stage), 2, axis=1)
            waited = parts @ waiting
        is_last = runs[-1][1] + 1 == len(kept)
        if candidate.schedule == "layered" and not candidate.per_block and is_last:
            numbers = numbers.copy()
            numbers[:, -1] /= candidate.num_micro_batches
        return Moments(numbers=numbers, kept_bytes=numbers @ held + waited)

    def _elements(self, blocks: NDArray[np.int64]) -> Elements:
        """The parameters of ``blocks``, each counted once."""
        costs = self.costs
        if not costs.shares_parameters:
            numel, experts = costs.numel[blocks].sum(), costs.expert_numel[blocks].sum()
            return Elements(all=float(numel), experts=float(experts))
        merged: dict[str, tuple[int, bool]] = {}
        for block in blocks.tolist():
            merged.update(self.costs.parameters[block])
        numel = float(sum(elements for elements, _ in merged.values()))
        experts = sum(elements for elements, is_expert in merged.values() if is_expert)
        return Elements(all=numel, experts=float(experts))

    def bytes_by_cause(self, stage: int, cuts: Sequence[int]) -> dict[str, int]:
        """Peak bytes of a rank of a stage; for ``cuts`` see ``virtual_stages``."""
        return rank_bytes(
            self.decided(cuts).contents(stage, cuts),
            sizes=self.sizes,
            is_sharded=self.candidate.zero_stage > 0,
            num_shards=self.candidate.num_shards,
            ep=self.candidate.ep,
            layered=self.candidate.schedule == "layered",
            offload_optimizer=self.candidate.offload_optimizer,
            memory=self.sites.memory[stage],
        )

    def host_bytes(self, stage: int, cuts: Sequence[int]) -> int:
        """What a rank of a stage has in its host's memory at its fullest: offloaded state, and what
        all micro-batches in flight keep of offloaded blocks.
        """
        total = 0.0
        if self._is_listed.any():
            held = self.costs.held_bytes * self._is_listed
            runs = self.virtual_stages(stage, cuts)
            of_runs = np.array([held[first : last + 1].sum() for first, last in runs])
            total += float((in_flight(self.candidate, stage) @ of_runs).max())
        if self.candidate.offload_optimizer:
            own = [range(first, last + 1) for first, last in self.virtual_stages(stage, cuts)]
            elements = self._elements(np.concatenate([np.array(blocks) for blocks in own]))
            updated = elements.all
            if self.candidate.zero_stage:
                updated = shard_numel(
                    elements.all,
                    elements.experts,
                    num_shards=self.candidate.num_shards,
                    ep=self.candidate.ep,
                )
            total += updated * self.sizes.offloaded
        return int(total)

    def kept_bytes(self) -> Floats:
        """Bytes that a micro-batch keeps of each block inside of a segment."""
        return self._kept[1]

    def rebuilt_bytes(self) -> Floats:
        """Bytes of each block that are there again in its backward: all that autograd keeps of one
        that is recomputed, or what its recomputed ops give.
        """
        costs, again = self.costs, self.again()
        found = costs.held_bytes * again + costs.rebuilt_bytes * (1 - again - self._is_partly)
        for part, is_done in self._parts:
            found = found + part.rebuilt_bytes * is_done
        return found

    def held_bytes(self) -> Floats:
        """Bytes that autograd keeps of each block that is not recomputed whole; 0 of others."""
        found = self.costs.held_bytes * (1 - self.again() - self._is_partly)
        for part, is_done in self._parts:
            found = found + part.held_bytes * is_done
        return found

    def input_kept_bytes(self) -> Floats:
        """Bytes of inputs that a micro-batch keeps of each block, recomputed or not."""
        candidate = self.candidate
        if not candidate.per_block:
            return np.zeros(self.costs.num_blocks)
        kept = self.costs.input_bytes.copy()
        if candidate.schedule == "layered":
            kept[-1] /= candidate.num_micro_batches  # it keeps one micro-batch at a time
        return kept

    @functools.cached_property
    def _kept(self) -> tuple[Floats, Floats]:
        """What a micro-batch keeps of each block, in bytes: if it starts a segment, and inside."""
        return self._kept_beside(self.offloaded())

    def _kept_beside(self, offloaded: Floats) -> tuple[Floats, Floats]:
        """The same beside blocks of which it is on the host.

        Segments and recomputed blocks keep their inputs. The last segment of a layered schedule,
        which has one micro-batch at a time, counts so much less if it is a block.
        """
        candidate, again = self.candidate, self.again()
        inputs, kept = self.costs.input_bytes, self.held_bytes() * (1 - offloaded)
        first, inside = kept + inputs, kept + inputs * again
        if candidate.per_block:
            inside = first
            if candidate.schedule == "layered":
                inside[-1] /= candidate.num_micro_batches
        return first, inside

    def again(self) -> Floats:
        """1 for blocks that are recomputed as a whole."""
        again = self.costs.again(self.candidate.recompute)
        if self.candidate.recomputed_blocks:
            again = again.copy()
            again[list(self.candidate.recomputed_blocks)] = 1.0
        return again

    @functools.cached_property
    def _parts(self) -> tuple[tuple[PartCosts, Floats], ...]:
        """Parts of blocks that are done again, with 1 for the blocks that the candidate lists."""
        by_op, gathers = np.zeros((2, self.costs.num_blocks))
        by_op[list(self.candidate.recomputed_by_op)] = 1.0
        gathers[list(self.candidate.gathered_again)] = 1.0
        pairs = [
            (part, (by_op == part.by_op) * (gathers == part.gathers) * 1.0)
            for part in self.costs.parts
        ]
        return tuple((part, is_done) for part, is_done in pairs if is_done.any())

    @functools.cached_property
    def _is_partly(self) -> Floats:
        """1 for blocks of which a part is done again."""
        found = [is_done for _, is_done in self._parts]
        return np.sum(found, axis=0) if found else np.zeros(self.costs.num_blocks)

    def offloadable(self) -> Floats:
        """1 for blocks that keep something that can be offloaded: the loss has its backward at
        once.
        """
        return self.costs.again("full") * (self.costs.held_bytes > 0)

    def offloaded(self) -> Floats:
        """1 for blocks whose activations are offloaded; where that is open, for all that can be."""
        if self.candidate.leaves_offloaded_open:
            return self.offloadable()
        return self._is_listed

    @functools.cached_property
    def _is_listed(self) -> Floats:
        """1 for the blocks that the candidate lists."""
        found = np.zeros(self.costs.num_blocks)
        found[list(self.candidate.offloaded_blocks)] = 1.0
        return found

    def decided(self, cuts: Sequence[int]) -> Stager:
        """With the blocks whose activations are offloaded, where the candidate leaves that open: of
        each stage the first ones, whose backwards come last.
        """
        candidate = self.candidate
        if not candidate.leaves_offloaded_open:
            return self
        able, chosen = self.offloadable() > 0, list[int]()
        for stage in range(candidate.pp):
            own = [
                block
                for first, last in self.virtual_stages(stage, cuts)
                for block in range(first, last + 1)
                if able[block]
            ]
            chosen += own[: candidate.offload_activations]
        blocks = tuple(sorted(chosen))
        return replace(self, candidate=replace(candidate, offloaded_blocks=blocks))

    def _offloaded_part(self, runs: Runs) -> Runs:
        """Of runs, the blocks up to the last one that ``decided`` chooses."""
        able = self.offloadable() > 0
        before = np.concatenate([[0], np.cumsum(able)])
        ends = np.append(np.flatnonzero(able) + 1, np.full(len(able) + 1, len(able)))
        last = before[runs.first] + self.candidate.offload_activations - 1
        end = np.minimum(ends[np.minimum(last, len(ends) - 1)], runs.end)
        return Runs(stage=runs.stage, first=runs.first, end=end)

    def peak_bytes(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """Peak bytes of each stage; for ``cuts`` see ``virtual_stages``."""
        return tuple(self.stage_bytes(stage, cuts) for stage in range(self.candidate.pp))

    def stage_bytes(self, stage: int, cuts: Sequence[int]) -> int:
        """Peak bytes of one stage."""
        return sum(self.bytes_by_cause(stage, cuts).values())

    def most_missing(self, cuts: Sequence[int]) -> int:
        """By how much the stage that is worst off exceeds what it may fill; negative: by how much
        it does not.
        """
        usable = self.sites.usable_bytes.astype(int).tolist()
        return max(peak - room for peak, room in zip(self.peak_bytes(cuts), usable, strict=True))

    def fits(self, cuts: Sequence[int]) -> bool:
        """Whether every stage has room for what it holds at its fullest."""
        return self.most_missing(cuts) <= 0

    def run_peaks(self, runs: Runs) -> Floats:
        """Peak bytes of runs, without virtual stages."""
        return self._account(runs).peak(self.run_kept(runs) + runs.maxima(self.rebuilt_bytes()))

    def run_kept(self, runs: Runs) -> Floats:
        """The most bytes that runs keep of all micro-batches in flight."""
        return functools.reduce(np.maximum, (kept for kept, _ in self.run_moments(runs)))

    def run_moments(self, runs: Runs) -> list[tuple[Floats, Floats]]:
        """The fullest moments of runs: bytes that they keep then, and micro-batches in flight."""
        candidate = self.candidate
        flying = self.flying[runs.stage]
        first_kept, inside = self._kept
        if candidate.leaves_offloaded_open:
            first_kept, inside = self._kept_beside(np.zeros(self.costs.num_blocks))
        kept = runs.sums(inside) + (first_kept - inside)[runs.first]
        if candidate.leaves_offloaded_open:
            _, least = self._kept
            kept = kept - self._offloaded_part(runs).sums(inside - least)
        if candidate.has_parts:
            waiting = runs.sums(self.costs.waiting_bytes)
            return [
                (still[runs.stage] * kept + num[runs.stage] * waiting, still[runs.stage])
                for still, num in self.moments_in_parts
            ]
        if candidate.schedule == "layered" and not candidate.per_block:
            # the last segment has one micro-batch at a time
            flying = np.where(runs.end == self.costs.num_blocks, 1.0, flying)
        return [(kept * flying, flying)]

    @functools.cached_property
    def moments_in_parts(self) -> list[tuple[Floats, Floats]]:
        """The fullest moments of backwards in two parts (``in_parts``), each for all stages; in the
        last one most are in flight.
        """
        found = [in_parts(self.candidate, stage) for stage in range(self.candidate.pp)]
        most = max(map(len, found))
        padded = np.array(
            [np.concatenate([rows[:1].repeat(most - len(rows), axis=0), rows]) for rows in found]
        )
        return [(padded[:, n, 0], padded[:, n, 1]) for n in range(most)]

    def run_room(self, runs: Runs, *, exact: bool = True) -> Floats:
        """Bytes that runs may keep, with those of the block that is recomputed; negative where
        nothing fits. Without ``exact``, no run that fits keeps more.
        """
        usable = self.sites.usable_bytes + (0 if exact else ROUNDED_BYTES)
        return self._account(runs).most_kept(usable[runs.stage])

    @functools.cached_property
    def flying(self) -> Floats:
        """The most micro-batches that each stage has in flight."""
        candidate = self.candidate
        return np.array([in_flight(candidate, stage).max() for stage in range(candidate.pp)])

    @functools.cached_property
    def flying_at_most(self) -> Floats:
        """The same with as many as may be in flight: what bounds of seconds count."""
        deepest = self.candidate.deepest
        return np.array([in_flight(deepest, stage).max() for stage in range(deepest.pp)])

    def _overlaps(self, stage: int) -> bool:
        return bool(in_flight(self.candidate, stage).max() > 1)

    def _parameter_bytes(
        self, numel: ManyElements, kept: ManyElements, summed: ManyElements
    ) -> tuple[Floats, Floats]:
        """Bytes of parameters, gradients and optimizer state, and of gradients widened to fp32.

        ``kept`` and ``summed`` are the parts that ``StageContents`` has of them.
        """
        candidate, sizes = self.candidate, self.sizes

        def sharded_beside(whole: ManyElements) -> Floats:
            rest, experts = numel[0] - whole[0], numel[1] - whole[1]
            return whole[0] + self._shard_numel(rest, experts)

        updated, beside = self._updated(*numel), np.zeros(numel[0].shape)
        if candidate.zero_stage and candidate.num_shards > 1:
            beside = self._shard_numel(*kept)
        master, moments = resident_bytes(
            sizes, updated, beside, offload_optimizer=candidate.offload_optimizer
        )
        fixed = sharded_beside(kept) * sizes.compute + master + moments
        fixed = fixed + sharded_beside(summed) * sizes.gradient
        return fixed, updated * sizes.widened

    def _updated(self, numel: Floats, experts: Floats) -> Floats:
        """Elements that the optimizer of a rank updates."""
        return self._shard_numel(numel, experts) if self.candidate.zero_stage else numel

    @functools.cached_property
    def _block_updated(self) -> Floats:
        """The same of each block."""
        return self._updated(self.costs.shared_numel, self.costs.shared_expert_numel)

    @functools.cached_property
    def lost_shares(self) -> Floats:
        """What the allocator of each stage loses of what comes and goes."""
        pairs = zip(self.sites.memory, self.flying, strict=True)
        return np.array([memory.lost_share(overlap=bool(n > 1)) for memory, n in pairs])

    @functools.cached_property
    def _context_bytes(self) -> Floats:
        return np.array([float(memory.context_bytes) for memory in self.sites.memory])

    def may_fit(self) -> bool:
        """Whether all stages together have room for what no cuts are without: parameters and their
        state, and a micro-batch on each stage, with all computed again that can be.
        """
        candidate, costs = self.candidate, self.costs
        whole = Runs(stage=np.array(0), first=np.array(0), end=np.array(costs.num_blocks))
        needed = float(self._run_parameter_bytes(whole, self._run_numel(whole))[0])
        if candidate.schedule != "layered":  # where the last segment's counts in part
            needed += float(self._least_kept()[1].sum() * (1 + self.lost_shares.min()))
        room = self.sites.usable_bytes + ROUNDED_BYTES - self._context_bytes
        return needed <= float(room.sum()) * _ABOVE

    def _least_kept(self) -> tuple[Floats, Floats]:
        """Bytes that a micro-batch keeps of each block at the least, as it is and recomputed."""
        kept = self._kept[1]
        if not self.candidate.leaves_again_open:
            return kept, kept
        costs = self.costs
        return kept, np.minimum(kept, np.where(costs.again("full") > 0, costs.input_bytes, kept))

    def least_run_bytes(self) -> LeastBytes:
        """What no run has fewer bytes than, as a sum over its blocks."""
        candidate, costs = self.candidate, self.costs
        numel = costs.numel, costs.expert_numel
        kept_whole, summed = (
            (numel[0] * part, numel[1] * part)
            for part in (self.zero_stages <= 2, self.zero_stages <= 1)
        )
        parameters, _ = self._parameter_bytes(numel, kept_whole, summed)
        kept, again = self._least_kept()
        parts = np.maximum(kept - costs.part_saved_bytes, again)
        numbers = self.flying.copy()
        if candidate.schedule == "layered" and not candidate.per_block:
            numbers[-1] = 1  # the last segment has one micro-batch at a time
        lost = 1 + self.lost_shares
        room = self.sites.usable_bytes + ROUNDED_BYTES - self._context_bytes
        fixed = np.tile(parameters, (candidate.pp, 1))
        if candidate.has_parts:
            _, waiting = self.moments_in_parts[-1]
            fixed = fixed + (waiting * lost)[:, None] * costs.waiting_bytes
        return LeastBytes(
            fixed=fixed,
            kept=kept,
            again=again,
            parts=parts,
            numbers=numbers * lost,
            room=room - lost * float(costs.temporary_bytes.min()),
        )

    def cut_peaks(self, rounds: Rounds) -> Floats:
        """Peak bytes of stages with virtual stages: ``stage_bytes`` but for what that rounds
        down.
        """
        kept = self._cut_kept(rounds) + rounds.maxima(self.rebuilt_bytes())
        return self._account(rounds).peak(kept)

    def cut_room(self, rounds: Rounds) -> Floats:
        """Bytes that stages may keep, with those of the block that is recomputed; negative where
        nothing fits.
        """
        return self._account(rounds).most_kept(self.sites.usable_bytes)

    def least_cut_peaks(self, rounds: Rounds) -> Floats:
        """The same of a candidate that leaves open what is computed again, if that is all that can
        be; of that the smallest is there at a time.
        """
        again = replace(self.candidate, recompute="full")
        able = self.costs.held_bytes[self.costs.again("full") > 0]
        if self.candidate.offload_activations:
            able = able[:0]  # maybe none is
        kept = replace(self, candidate=again)._cut_kept(rounds) + min(able, default=0.0)
        return self._account(rounds).peak(kept)

    def least_cuts_fit(self, rounds: Rounds) -> Bools:
        """Whether each choice of cuts may fit, whatever is computed again."""
        usable = self.sites.usable_bytes + ROUNDED_BYTES
        peaks = self.least_cut_peaks if self.candidate.recompute == "blocks" else self.cut_peaks
        return np.all(peaks(rounds) <= usable, axis=1)

    def _cut_kept(self, rounds: Rounds) -> Floats:
        """Bytes that stages keep of all micro-batches in flight: the same in any ZeRO stage."""
        key = (self.candidate.of_any_zero, rounds.each.first.tobytes())
        if key not in self.costs.known_kept:
            self.costs.known_kept[key] = self._made_cut_kept(rounds)
        return self.costs.known_kept[key]

    def _made_cut_kept(self, rounds: Rounds) -> Floats:
        candidate, runs = self.candidate, rounds.each
        first_kept, inside = self._kept
        held = runs.sums(inside) + (first_kept - inside)[runs.first]
        if candidate.schedule == "layered" and not candidate.per_block:
            last = runs.end == self.costs.num_blocks
            held = np.where(last, held / candidate.num_micro_batches, held)
        flying = in_flight
        if candidate.schedule == "zero_bubble":
            held = np.concatenate([held, runs.sums(self.costs.waiting_bytes)], axis=-2)
            flying = in_parts
        moments = [
            (held[..., stage] @ flying(candidate, stage).T).max(axis=-1)
            for stage in range(candidate.pp)
        ]
        return np.stack(moments, axis=-1)

    def _account(self, runs: Runs | Rounds) -> Account:
        """All bytes of runs but what they keep, and what is recomputed: it is ``rank_bytes`` on
        arrays, and held to it by a test.
        """
        costs, candidate, sizes = self.costs, self.candidate, self.sizes
        numel = self._run_numel(runs)
        fixed, floor = self._run_parameter_bytes(runs, numel)
        if candidate.offload_optimizer:
            updated, of_block = self._updated(*numel), runs.maxima(self._block_updated)
            floor = floor + state_buffer_bytes(sizes, updated, of_block)
        buffers = self._largest_segments(runs, np.ones(costs.num_blocks, dtype=bool), most=1)
        buffers, gathered = buffers * sizes.compute, np.zeros(numel[0].shape)
        if candidate.zero_stage and candidate.num_shards > 1:
            most = 2 if candidate.schedule == "layered" else 1
            scattered, regathered = self._buffered_stages >= 2, self._buffered_stages == 3
            buffers = buffers + sizes.gradient * self._largest_segments(runs, scattered, most=most)
            gathered = sizes.compute * self._largest_segments(runs, regathered, most=2)
        borders = np.append(costs.border_bytes, 0.0)
        messages = 2.0 * runs.at_ends(borders)
        temporary = np.maximum(runs.maxima(costs.temporary_bytes), buffers)
        return Account(
            fixed=fixed + self._context_bytes[runs.stage],
            beside=temporary + messages + gathered + self._run_offload_buffers(runs),
            floor=floor,
            fragmentation=self.lost_shares[runs.stage],
        )

    def _run_offload_buffers(self, runs: Runs | Rounds) -> Floats | float:
        """``_offload_buffers`` of runs."""
        part, listed = runs, self._is_listed
        if self.candidate.leaves_offloaded_open:
            if isinstance(runs, Rounds):
                return 0.0
            part, listed = self._offloaded_part(runs), self.offloadable()
        if not listed.any():
            return 0.0
        held = self.costs.held_bytes * listed
        most = part.sums((held > 0).astype(np.float64)) * self.flying[runs.stage]
        return part.maxima(held) * np.minimum(ACTIVATION_BUFFERS, most)

    def _run_parameter_bytes(
        self, runs: Runs | Rounds, numel: ManyElements
    ) -> tuple[Floats, Floats]:
        """``_parameter_bytes`` of runs that have so many elements."""
        kept, summed = (
            self._part_numel(runs, numel, part)
            for part in (self.zero_stages <= 2, self.zero_stages <= 1)
        )
        return self._parameter_bytes(numel, kept, summed)

    def _run_numel(self, runs: Runs | Rounds, part: Bools | None = None) -> ManyElements:
        """``_elements`` of runs, or of a part of their blocks."""
        costs, counted = self.costs, 1.0 if part is None else part
        numel = runs.sums(costs.shared_numel * counted)
        experts = runs.sums(costs.shared_expert_numel * counted)
        for users, own, own_experts in costs.shared:
            more = np.maximum(0.0, runs.sums(users * counted) - 1)
            numel, experts = numel - more * own, experts - more * own_experts
        return numel, experts

    def _part_numel(self, runs: Runs | Rounds, numel: ManyElements, part: Bools) -> ManyElements:
        """The same of a part, where ``numel`` are those of all blocks."""
        if part.all():
            return numel
        if not part.any():
            return np.zeros(numel[0].shape), np.zeros(numel[1].shape)
        return self._run_numel(runs, part)

    def _largest_segments(self, runs: Runs | Rounds, part: Bools, *, most: int) -> Floats:
        """Elements of the largest segment of those whose blocks are a part of all, times how many
        of them are there, at most so many.
        """
        if not part.any():
            return np.zeros(runs.length.shape)
        if self.candidate.per_block:
            largest = runs.maxima(self.costs.shared_numel * part)
            return largest * np.minimum(most, runs.sums(part.astype(np.float64)))
        each = runs.each if isinstance(runs, Rounds) else runs
        own = each.at_first(part.astype(np.float64))
        numel = self._run_numel(each)[0] * own
        if isinstance(runs, Rounds):
            numel, own = numel.max(axis=-2), own.sum(axis=-2)
        return numel * np.minimum(most, own)


def _segments(numels: Floats) -> Segments:
    return Segments(number=len(numels), largest=float(numels.max(initial=0.0)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Account:
    """Bytes of runs of blocks, by what they keep.

    Attributes:
        fixed: What stays, whatever is kept.
        beside: What is there at the fullest moment beside what is kept.
        floor: What takes the room of both once a step, where it is more.
        fragmentation: Lost, of what is kept and beside it.
    """

    fixed: Floats
    beside: Floats
    floor: Floats
    fragmentation: Floats

    def peak(self, kept: Floats) -> Floats:
        """Bytes of runs that keep so much."""
        held = kept + self.beside
        return self.fixed + np.maximum(held, self.floor) + held * self.fragmentation

    def most_kept(self, usable_bytes: Floats) -> Floats:
        """The most that runs can keep; negative where nothing fits."""
        room, share = usable_bytes - self.fixed, self.fragmentation
        with np.errstate(divide="ignore", invalid="ignore"):  # nothing is lost: no limit
            above_floor = np.where(share > 0, (room - self.floor) / share, np.inf)
        held = np.minimum(room / (1 + share), above_floor)
        return np.where(room >= self.floor, held, 0.0) - self.beside


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moments:
    """The fullest moments of a stage.

    Attributes:
        numbers: A row for each: of how many micro-batches each virtual stage keeps what it keeps.
        kept_bytes: What is kept of all of them.
    """

    numbers: Floats
    kept_bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeastBytes:
    """Bytes of stages, at the least.

    Attributes:
        fixed: Of each stage (a row) and block: parameters, gradients and optimizer state, and what
            is kept between the parts of backwards.
        kept, again: What a micro-batch keeps of each block, and of one that is recomputed.
        parts: The same of one that does a part again, a row for each part.
        numbers: Of micro-batches that each stage keeps it of, with what the allocator loses.
        room: Of each stage for all of it.
    """

    fixed: Floats
    kept: Floats
    again: Floats
    parts: Floats
    numbers: Floats
    room: Floats

    def floor(self) -> Floor:
        """Of all, whatever is recomputed; at most 0 where it fits."""
        num_bytes = prefixes(self.fixed + self.numbers[:, None] * self.again)
        return Floor(first=num_bytes, end=num_bytes - self.room[:, None] * _ABOVE)


def _seconds_of(links: Links, collective: Collective, num_bytes: Floats, group: Group) -> Floats:
    """Seconds of a collective for each number of bytes; many are alike."""
    sizes = num_bytes.tolist()
    known = {size: _seconds(links.cluster, collective, size, group) for size in set(sizes)}
    return np.array([known[size] for size in sizes])


@functools.lru_cache(maxsize=4096)
def _seconds(cluster: Cluster, collective: Collective, num_bytes: float, group: Group) -> float:
    return Links(cluster).seconds(collective, num_bytes, group)
