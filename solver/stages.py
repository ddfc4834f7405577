"""What runs of blocks cost as stages of a candidate: seconds and bytes of every run at once.

All matrices are indexed ``[i, j]``: the run of blocks ``i … j − 1``. Sums are differences of prefix
sums, so that a candidate with 82 blocks and 64 stages takes milliseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir.moves import Collective
from autopar.solver.candidates import Candidate
from autopar.solver.costs.comm import Group, Links, group_of
from autopar.solver.costs.memory import Itemsizes, StageContents, rank_bytes, shard_numel
from autopar.solver.costs.parameters import ParameterCosts
from autopar.solver.facts import BlockCosts, Floats
from autopar.solver.hardware import Cluster
from autopar.solver.in_flight import in_flight

ROUNDED_BYTES = 16
"""Each cause of ``bytes_by_cause`` is rounded down: no sum of them is so much below the account."""


@dataclass(frozen=True, eq=False)
class Stager:
    """Costs of stages of one candidate, from the costs of its blocks."""

    cluster: Cluster
    candidate: Candidate
    costs: BlockCosts
    sizes: Itemsizes

    def virtual_stages(self, stage: int, cuts: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """First and last block of each virtual stage of a stage, one of ``candidate``'s each.

        ``cuts`` has the first block of every virtual stage, then the number of blocks. Virtual
        stage c is on stage c mod p.
        """
        numbers = range(stage, len(cuts) - 1, self.candidate.pp)
        return tuple((cuts[number], cuts[number + 1] - 1) for number in numbers)

    # Seconds

    def backward_s(self) -> Floats:
        """Backward of each block, with the forward again where it is recomputed, and with gradients
        added to those of the micro-batches before.
        """
        again = self.costs.forward_s * self.again()
        return self.costs.backward_s + again + self.adding_s()

    def adding_s(self) -> Floats:
        """Seconds in which each block's gradients are added to those of earlier micro-batches."""
        return self._parameter_costs().adding_s(
            self.costs.num_parameters,
            self.costs.shared_numel,
            num_micro_batches=self.candidate.num_micro_batches,
        )

    def _parameter_costs(self) -> ParameterCosts:
        return ParameterCosts(self.cluster.hardware, self.sizes)

    def gather_s(self) -> Floats:
        """Seconds of gathering the parameters of each block over the shard axis."""
        return self._gather_s

    def reduce_s(self) -> Floats:
        """Seconds of reducing the gradients of each block over the data axes."""
        return self._reduce_s

    @functools.cached_property
    def _gather_s(self) -> Floats:
        gathering = self._collective_s(Collective.ALL_GATHER, self.sizes.compute)
        if self.candidate.zero_stage == 0 or self.candidate.num_shards == 1:
            return gathering
        num = self.costs.num_parameters
        return gathering + self._parameter_costs().copying_s(num, self.costs.numel)

    @functools.cached_property
    def _reduce_s(self) -> Floats:
        if self.candidate.zero_stage == 0:
            return self._collective_s(Collective.ALL_REDUCE, self.sizes.reduce)
        scattered = self._collective_s(Collective.REDUCE_SCATTER, self.sizes.reduce)
        if self.candidate.dp_replicate == 1:
            return scattered
        links, group = Links(self.cluster), self._replicate_group()
        numel = self._shard_numel(self.costs.numel, self.costs.expert_numel)
        return scattered + _seconds_of(
            links, Collective.ALL_REDUCE, numel * self.sizes.reduce, group
        )

    def _collective_s(self, collective: Collective, itemsize: int) -> Floats:
        """Of the parameters that context and expert ranks share, and of the experts apart."""
        candidate = self.candidate
        if candidate.zero_stage == 0 and collective is Collective.ALL_GATHER:
            return np.zeros(self.costs.num_blocks)
        ranks = (candidate.dp_shard if candidate.zero_stage else candidate.dp) * candidate.cp
        links, experts = Links(self.cluster), self.costs.expert_numel * itemsize
        group = group_of(self.cluster, size=ranks * candidate.ep, stride=candidate.tp)
        total = _seconds_of(links, collective, self.costs.numel * itemsize - experts, group)
        if not experts.any():
            return total
        stride = candidate.tp * candidate.ep
        apart = group_of(self.cluster, size=ranks, stride=stride)
        return total + _seconds_of(links, collective, experts, apart)

    def _replicate_group(self) -> Group:
        stride = self.candidate.tp * self.candidate.num_shards
        return group_of(self.cluster, size=self.candidate.dp_replicate, stride=stride)

    def _shard_numel(self, numel: Floats, expert_numel: Floats) -> Floats:
        """Elements of a rank's ZeRO shards."""
        candidate = self.candidate
        return shard_numel(numel, expert_numel, num_shards=candidate.num_shards, ep=candidate.ep)

    def optimizer_s(self) -> Floats:
        """Seconds of clipping and the optimizer on the parameters of each block."""
        return self._optimizer_s

    @functools.cached_property
    def _optimizer_s(self) -> Floats:
        numel = self.costs.numel
        if self.candidate.zero_stage:
            numel = self._shard_numel(numel, self.costs.expert_numel)
        return self._parameter_costs().update_s(self.costs.num_first_parameters, numel)

    def message_s(self, num_bytes: float, border: int) -> float:
        """Seconds of a message of a rank from stage ``border`` to the next."""
        per_stage = self.candidate.ranks_per_stage
        per_node = self.cluster.gpus_per_node
        crosses = per_stage >= per_node or ((border + 1) * per_stage) % per_node == 0
        return Links(self.cluster).message_seconds(
            num_bytes,
            crosses_nodes=crosses and self.cluster.nodes > 1,
            sharing=min(per_stage, per_node),
        )

    # Bytes

    def contents(self, stage: int, cuts: Sequence[int]) -> StageContents:
        """What a stage holds; for ``cuts`` see ``virtual_stages``."""
        candidate, costs = self.candidate, self.costs
        runs = self.virtual_stages(stage, cuts)
        own = np.concatenate([np.arange(first, last + 1) for first, last in runs])
        numels = [self._numel(np.arange(first, last + 1)) for first, last in runs]
        numel, experts = (float(sum(parts)) for parts in zip(*numels, strict=True))
        if costs.shares_parameters:
            numel, experts = self._numel(own)
        largest = max(elements for elements, _ in numels)
        if candidate.per_block and len(own) > 1:
            largest = float(costs.shared_numel[own].max())
        first_kept, kept = self._kept
        held = np.array(
            [first_kept[first] + kept[first + 1 : last + 1].sum() for first, last in runs]
        )
        if (
            candidate.schedule == "layered"
            and not candidate.per_block
            and runs[-1][1] + 1 == len(kept)
        ):
            held[-1] /= candidate.num_micro_batches
        borders = np.append(costs.border_bytes, 0.0)
        flying = in_flight(candidate, stage)
        return StageContents(
            numel=numel,
            expert_numel=experts,
            segment_numel=largest,
            num_segments=len(own) if candidate.per_block else len(runs),
            overlap=self._overlaps(stage),
            activation_bytes=float((flying @ held).max()),
            recompute_bytes=float(self.rebuilt_bytes()[own].max()),
            temporary_bytes=float(costs.temporary_bytes[own].max()),
            message_bytes=max(2.0 * float(borders[i] + borders[j + 1]) for i, j in runs),
        )

    def _numel(self, blocks: NDArray[np.int64]) -> tuple[float, float]:
        """Elements of the parameters of ``blocks``, each counted once; and those of experts."""
        costs = self.costs
        if not costs.shares_parameters:
            return float(costs.numel[blocks].sum()), float(costs.expert_numel[blocks].sum())
        merged: dict[str, tuple[int, bool]] = {}
        for block in blocks.tolist():
            merged.update(self.costs.parameters[block])
        numel = float(sum(elements for elements, _ in merged.values()))
        return numel, float(sum(elements for elements, is_expert in merged.values() if is_expert))

    def bytes_by_cause(self, contents: StageContents) -> dict[str, int]:
        """Peak bytes of a rank of a stage."""
        return rank_bytes(
            contents,
            sizes=self.sizes,
            zero_stage=self.candidate.zero_stage,
            num_shards=self.candidate.num_shards,
            ep=self.candidate.ep,
            layered=self.candidate.schedule == "layered",
            hardware=self.cluster.hardware,
        )

    def kept_bytes(self) -> Floats:
        """Bytes that a micro-batch keeps of each block inside of a segment."""
        return self._kept[1]

    def rebuilt_bytes(self) -> Floats:
        """Bytes of each block that are there again in its backward: all that autograd keeps of one
        that is recomputed, or what its recomputed ops give.
        """
        again = self.again()
        return self.costs.held_bytes * again + self.costs.rebuilt_bytes * (1 - again)

    @functools.cached_property
    def _kept(self) -> tuple[Floats, Floats]:
        """Bytes that a micro-batch keeps of each block: where it starts a segment, and inside one.

        Segments and recomputed blocks keep their inputs. The last segment of a layered schedule,
        which has one micro-batch at a time, counts so much less if it is a block.
        """
        candidate, inputs, again = self.candidate, self.costs.input_bytes, self.again()
        kept = self.costs.held_bytes * (1 - again)
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

    def peak_bytes(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """Peak bytes of each stage; for ``cuts`` see ``virtual_stages``."""
        return tuple(self.stage_bytes(stage, cuts) for stage in range(self.candidate.pp))

    def stage_bytes(self, stage: int, cuts: Sequence[int]) -> int:
        """Peak bytes of one stage."""
        return sum(self.bytes_by_cause(self.contents(stage, cuts)).values())

    def peak_matrix(self, stage: int, *, shared: bool = True) -> Floats:
        """Peak bytes of every run as ``stage`` without virtual stages; without
        ``shared``, parameters that several blocks share count only where they are first used.
        """
        rebuilt = run_maxima(self.rebuilt_bytes())
        return self._account(stage, shared=shared).peak(self.kept_matrix(stage) + rebuilt)

    def kept_matrix(self, stage: int) -> Floats:
        """Bytes that every run as ``stage`` keeps of all micro-batches in flight."""
        candidate = self.candidate
        flying = float(in_flight(candidate, stage).max())
        kept = self._kept_once * flying
        if candidate.schedule == "layered" and not candidate.per_block:
            kept[:, -1] /= flying  # the last segment has one micro-batch at a time
        return kept

    def room_matrix(self, stage: int, *, shared: bool = True) -> Floats:
        """Bytes that every run as ``stage`` may keep, with those of the block that is recomputed;
        negative where nothing fits. For ``shared`` see ``peak_matrix``; without it, no run that
        fits keeps more.
        """
        key = (self._overlaps(stage), shared)
        if key not in self._rooms:
            account = self._account(stage, shared=shared)
            usable = self.cluster.usable_bytes + (0 if shared else ROUNDED_BYTES)
            self._rooms[key] = account.most_kept(usable)
        return self._rooms[key]

    @functools.cached_property
    def _rooms(self) -> dict[tuple[bool, bool], Floats]:
        return {}

    @functools.cached_property
    def _kept_once(self) -> Floats:
        first_kept, inside = self._kept
        return run_sums(inside) + (first_kept - inside)[:, None]

    def _overlaps(self, stage: int) -> bool:
        return bool((in_flight(self.candidate, stage) > 1).any())

    def _account(self, stage: int, *, shared: bool) -> Account:
        """All of every run's bytes as ``stage`` but what it keeps, and what is recomputed: it is
        ``rank_bytes`` on matrices, and held to it by a test.
        """
        costs, candidate, sizes = self.costs, self.candidate, self.sizes
        memory, zero, shards = (
            self.cluster.hardware.memory,
            candidate.zero_stage,
            candidate.num_shards,
        )
        numel_of_blocks = costs.shared_numel if shared else costs.numel
        experts = run_sums(costs.shared_expert_numel if shared else costs.expert_numel)
        numel = run_sums(numel_of_blocks)
        largest = run_maxima(numel_of_blocks) if candidate.per_block else numel
        sharded = shard_numel(numel, experts, num_shards=shards, ep=candidate.ep)
        master = sizes.master or (sizes.compute if zero in (1, 2) and shards > 1 else 0)
        fixed = (
            (sharded if zero == 3 else numel) * sizes.compute
            + (sharded if zero >= 1 else numel) * (master + sizes.moments)
            + (sharded if zero >= 2 else numel) * sizes.gradient
        )
        num = costs.num_blocks
        length = np.arange(num + 1)[None, :] - np.arange(num)[:, None]
        doubled = np.minimum(2, length) if candidate.per_block else 1
        buffers, gathered = largest * sizes.compute, np.zeros(numel.shape)
        if zero >= 2 and shards > 1:
            layered = candidate.schedule == "layered"
            buffers = buffers + largest * sizes.gradient * (doubled if layered else 1)
        if zero == 3 and shards > 1:
            gathered = largest * doubled * sizes.compute
        borders = np.append(costs.border_bytes, 0.0)
        messages = 2.0 * (borders[:-1, None] + borders[None, :])
        temporary = np.maximum(run_maxima(costs.temporary_bytes), buffers)
        return Account(
            fixed=fixed + memory.context_bytes,
            beside=temporary + messages + gathered,
            floor=(sharded if zero >= 1 else numel) * sizes.widened,
            fragmentation=memory.lost_share(overlap=self._overlaps(stage)),
        )


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
    fragmentation: float

    def peak(self, kept: Floats) -> Floats:
        """Bytes of runs that keep so much."""
        held = kept + self.beside
        return self.fixed + np.maximum(held, self.floor) + held * self.fragmentation

    def most_kept(self, usable_bytes: float) -> Floats:
        """The most that runs can keep; negative where nothing fits."""
        room, share = usable_bytes - self.fixed, self.fragmentation
        above_floor = (room - self.floor) / share if share else np.full(room.shape, np.inf)
        held = np.minimum(room / (1 + share), above_floor)
        return np.where(room >= self.floor, held, 0.0) - self.beside


def _seconds_of(links: Links, collective: Collective, num_bytes: Floats, group: Group) -> Floats:
    """Seconds of a collective for each number of bytes; many are alike."""
    sizes = num_bytes.tolist()
    known = {size: _seconds(links.cluster, collective, size, group) for size in set(sizes)}
    return np.array([known[size] for size in sizes])


@functools.lru_cache(maxsize=4096)
def _seconds(cluster: Cluster, collective: Collective, num_bytes: float, group: Group) -> float:
    return Links(cluster).seconds(collective, num_bytes, group)


def run_sums(values: Floats) -> Floats:
    """Sums of all runs: ``[i, j]`` is the sum of ``values[i:j]``, for ``j`` up to the length."""
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    return prefix[None, :] - prefix[:-1, None]


def run_maxima(values: Floats) -> Floats:
    """Maxima of all runs of non-negative ``values``; 0 for empty ones. Not to be written to."""
    return _run_maxima(values.tobytes())


@functools.lru_cache(maxsize=64)  # every stage of a candidate asks for the same ones
def _run_maxima(data: bytes) -> Floats:
    values = np.frombuffer(data)
    masked = np.triu(np.broadcast_to(values, (len(values), len(values))))
    found = np.zeros((len(values), len(values) + 1))
    np.maximum.accumulate(masked, axis=1, out=found[:, 1:])
    found.flags.writeable = False
    return found
