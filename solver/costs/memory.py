"""Bytes on the fullest moment of a rank, by cause.

======================  ==========================================================================
parameters              in the dtype of compute; ZeRO 3 keeps a shard
master weights          fp32 beside 16-bit parameters; ZeRO ≥ 1 keeps a shard (beside gathered ones)
optimizer               two moments for Adam and AdamW, as master weights
gradients               as accumulated (by default fp32 or wider); ZeRO ≥ 2 keeps a shard
fp32 gradients          of a shard of narrower gradients, for the optimizer: what they need beyond
                        what is free by then
state buffers           of offloaded master weights and optimizer state, which live on the host: the
                        buckets that are on the device while they are stepped, beyond the same
gradient buffers        a segment's gradients before they are added or reduced
gather buffers          ZeRO 3: the gathered parameters of two segments
activations             what autograd keeps, or the inputs of recomputed blocks, of all
                        micro-batches in flight; of backwards in two parts also what their weight
                        parts wait with
recompute               what autograd keeps of the one block that is recomputed, or what single
                        ops that are recomputed give to the backward of one block
temporaries             the op that needs most beside what is kept: logits, as a rule. What it needs
                        beyond gradient buffers, which come when it is done
messages                activations and gradients on their way between stages
context, fragmentation  from the hardware file
======================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from autopar.ir.offload import STATE_BUCKET_NUMEL, STATE_BUCKETS
from autopar.ir.plan import PrecisionName, TrainingPlan
from autopar.solver.hardware.spec import Memory

Numel = TypeVar("Numel", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True, kw_only=True)
class Itemsizes:
    """Bytes per parameter element, by what holds them."""

    compute: int
    master: int  # 0 where the parameters are the master weights
    moments: int
    gradient: int  # as they are accumulated
    reduce: int  # as they are sent

    @property
    def offloaded(self) -> int:
        """Of master weights and optimizer state that can be on the host: master weights that are no
        wider than parameters are the parameters.
        """
        return self.master + self.moments

    @property
    def widened(self) -> int:
        """Of gradients for the optimizer, where they are accumulated in less than master weights
        have.
        """
        return self.master if self.gradient < self.master else 0


def itemsizes(training: TrainingPlan) -> Itemsizes:
    """Bytes per element under a precision and an optimizer."""
    compute = _ITEMSIZES[training.precision]
    wide = max(4, compute)
    return Itemsizes(
        compute=compute,
        master=wide if compute < wide else 0,
        moments=0 if training.optimizer == "sgd" else 2 * wide,
        gradient=_ITEMSIZES[training.gradient_dtype],
        reduce=_ITEMSIZES[training.reduce_dtype],
    )


_ITEMSIZES: Mapping[PrecisionName, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContents:
    """What a rank of a stage holds.

    Attributes:
        numel: Elements of its parameters as segments use them: sharded over layout axes only.
        expert_numel: The part of them that the expert axis shards.
        segment_numel: Elements of the parameters of its largest segment.
        block_updated: Elements that the optimizer updates of the block with most of them.
        num_segments: Segments on the stage.
        overlap: Whether several micro-batches are in flight.
        activation_bytes: Of all micro-batches in flight.
        recompute_bytes: Of the block that is recomputed, or some ops of it.
        temporary_bytes: Of the op that needs most.
        message_bytes: One message at each border of the stage.
    """

    numel: float
    expert_numel: float
    segment_numel: float
    block_updated: float
    num_segments: int
    overlap: bool
    activation_bytes: float
    recompute_bytes: float
    temporary_bytes: float
    message_bytes: float


def shard_numel(numel: Numel, expert_numel: Numel, *, num_shards: int, ep: int) -> Numel:
    """Elements of a ZeRO shard of parameters, some of which the expert axis shards already."""
    return (numel + (ep - 1) * expert_numel) / num_shards


def resident_state(
    sizes: Itemsizes, *, zero_stage: int, num_shards: int, offload_optimizer: bool
) -> tuple[int, int]:
    """Bytes for each updated element of master weights and of optimizer state, on the device.

    With fp32 compute, ZeRO 1 and 2 hold their shard beside the gathered parameters; where wider
    master weights are offloaded, they do so in the dtype of compute.
    """
    shard = sizes.compute if zero_stage in (1, 2) and num_shards > 1 else 0
    if offload_optimizer:
        return shard, 0
    return sizes.master or shard, sizes.moments


def state_buffer_bytes(sizes: Itemsizes, updated: Numel, block_updated: Numel) -> Numel:
    """Of buckets of offloaded state on the device: ``updated`` elements in all, so many at the most
    in a block. A bucket is full with the parameter that fills it.
    """
    most = STATE_BUCKETS * (STATE_BUCKET_NUMEL + block_updated)
    return cast("Numel", np.minimum(updated, most)) * sizes.offloaded


def rank_bytes(
    stage: StageContents,
    *,
    sizes: Itemsizes,
    zero_stage: int,
    num_shards: int,
    ep: int,
    layered: bool,
    offload_optimizer: bool,
    memory: Memory,
) -> dict[str, int]:
    """Bytes by cause; their sum is the peak.

    Args:
        num_shards: Ranks over which ZeRO shards what all of them use whole; the expert axis is one
            of their axes, so that experts have ``num_shards / ep``.
        offload_optimizer: Whether master weights and optimizer state are on the host.
        memory: What tensors cannot use.
    """
    sharded = shard_numel(stage.numel, stage.expert_numel, num_shards=num_shards, ep=ep)
    stored = sharded if zero_stage == 3 else stage.numel
    accumulated = sharded if zero_stage >= 2 else stage.numel
    updated = sharded if zero_stage >= 1 else stage.numel
    master, moments = resident_state(
        sizes, zero_stage=zero_stage, num_shards=num_shards, offload_optimizer=offload_optimizer
    )
    gathered = 0.0
    if zero_stage == 3 and num_shards > 1:
        gathered = stage.segment_numel * min(2, stage.num_segments) * sizes.compute
    buffer = stage.segment_numel * sizes.compute
    if zero_stage >= 2 and num_shards > 1:
        buffer += (
            stage.segment_numel * sizes.gradient * (min(2, stage.num_segments) if layered else 1)
        )
    dynamic = (
        stage.activation_bytes
        + stage.recompute_bytes
        + max(stage.temporary_bytes, buffer)
        + stage.message_bytes
        + gathered
    )
    widened = max(0.0, updated * sizes.widened - dynamic)
    at_end = updated * sizes.widened
    if offload_optimizer:
        at_end += state_buffer_bytes(sizes, updated, stage.block_updated)
    causes: dict[str, float] = {
        "parameters": stored * sizes.compute,
        "master weights": updated * master,
        "optimizer": updated * moments,
        "gradients": accumulated * sizes.gradient,
        "fp32 gradients": widened,
        "state buffers": max(0.0, at_end - dynamic) - widened,
        "gradient buffers": buffer,
        "gather buffers": gathered,
        "activations": stage.activation_bytes,
        "recompute": stage.recompute_bytes,
        "temporaries": max(0.0, stage.temporary_bytes - buffer),
        "messages": stage.message_bytes,
        "context": memory.context_bytes,
        "fragmentation": dynamic * memory.lost_share(overlap=stage.overlap),
    }
    return {cause: int(amount) for cause, amount in causes.items()}
