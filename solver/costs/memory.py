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
gather buffers          ZeRO 3: the gathered parameters of two segments. Where segments have
                        several ZeRO stages, each counts as it has
activations             what autograd keeps, or the inputs of recomputed blocks, of all
                        micro-batches in flight; of backwards in two parts also what their weight
                        parts wait with
recompute               what autograd keeps of the one block that is recomputed, or what single
                        ops that are recomputed give to the backward of one block
offload buffers         of offloaded activations, which live on the host: what three forwards keep,
                        one that is computed, one that leaves, and one that is back
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
class Elements:
    """Elements of parameters as segments use them: sharded over layout axes only. ``experts`` is
    the part of ``all`` that the expert axis shards.
    """

    all: float
    experts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Some of the segments of a stage: how many, and elements of the parameters of the largest."""

    number: int
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContents:
    """What a rank of a stage holds.

    Attributes:
        parameters: Elements of all of its parameters.
        kept: Those that are whole for all of the step (ZeRO 0 to 2).
        summed: Those whose gradients are accumulated whole (ZeRO 0 and 1).
        segment_numel: Elements of the parameters of its largest segment.
        block_updated: Elements that the optimizer updates of the block with most of them.
        regathered: Segments that are gathered for each use (ZeRO 3).
        scattered: Segments whose gradients are accumulated as shards (ZeRO 2 and 3).
        overlap: Whether several micro-batches are in flight.
        activation_bytes: Of all micro-batches in flight.
        recompute_bytes: Of the block that is recomputed, or some ops of it.
        temporary_bytes: Of the op that needs most.
        message_bytes: One message at each border of the stage.
        offload_bytes: Of offloaded activations, on the device.
    """

    parameters: Elements
    kept: Elements
    summed: Elements
    segment_numel: float
    block_updated: float
    regathered: Segments
    scattered: Segments
    overlap: bool
    activation_bytes: float
    recompute_bytes: float
    temporary_bytes: float
    message_bytes: float
    offload_bytes: float = 0.0


def shard_numel(numel: Numel, expert_numel: Numel, *, num_shards: int, ep: int) -> Numel:
    """Elements of a ZeRO shard of parameters, some of which the expert axis shards already."""
    return (numel + (ep - 1) * expert_numel) / num_shards


def resident_bytes(
    sizes: Itemsizes, updated: Numel, beside: Numel, *, offload_optimizer: bool
) -> tuple[Numel, Numel]:
    """Bytes of master weights and of optimizer state on the device, of ``updated`` elements.

    With fp32 compute, ZeRO 1 and 2 hold their shard ``beside`` the gathered parameters; where wider
    master weights are offloaded, they do so in the dtype of compute.
    """
    shard = beside * sizes.compute
    if offload_optimizer:
        return shard, updated * 0
    return updated * sizes.master if sizes.master else shard, updated * sizes.moments


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
    is_sharded: bool,
    num_shards: int,
    ep: int,
    layered: bool,
    offload_optimizer: bool,
    memory: Memory,
) -> dict[str, int]:
    """Bytes by cause; their sum is the peak.

    Args:
        is_sharded: Whether there is ZeRO at all.
        num_shards: Ranks over which ZeRO shards what all of them use whole; the expert axis is one
            of their axes, so that experts have ``num_shards / ep``.
        offload_optimizer: Whether master weights and optimizer state are on the host.
        memory: What tensors cannot use.
    """

    def sharded_beside(whole: Elements) -> float:
        """Elements of all parameters, of which some are whole."""
        rest, experts = stage.parameters.all - whole.all, stage.parameters.experts - whole.experts
        return whole.all + shard_numel(rest, experts, num_shards=num_shards, ep=ep)

    updated = sharded_beside(Elements(all=0.0, experts=0.0) if is_sharded else stage.parameters)
    gathered, buffer, beside = 0.0, stage.segment_numel * sizes.compute, 0.0
    if num_shards > 1 and is_sharded:
        kept, regathered, scattered = stage.kept, stage.regathered, stage.scattered
        beside = shard_numel(kept.all, kept.experts, num_shards=num_shards, ep=ep)
        gathered = regathered.largest * min(2, regathered.number) * sizes.compute
        num_buffers = min(2 if layered else 1, scattered.number)
        buffer += scattered.largest * num_buffers * sizes.gradient
    master, moments = resident_bytes(sizes, updated, beside, offload_optimizer=offload_optimizer)
    dynamic = (
        stage.activation_bytes
        + stage.recompute_bytes
        + max(stage.temporary_bytes, buffer)
        + stage.message_bytes
        + gathered
        + stage.offload_bytes
    )
    widened = max(0.0, updated * sizes.widened - dynamic)
    at_end = updated * sizes.widened
    if offload_optimizer:
        at_end += state_buffer_bytes(sizes, updated, stage.block_updated)
    causes: dict[str, float] = {
        "parameters": sharded_beside(stage.kept) * sizes.compute,
        "master weights": master,
        "optimizer": moments,
        "gradients": sharded_beside(stage.summed) * sizes.gradient,
        "fp32 gradients": widened,
        "state buffers": max(0.0, at_end - dynamic) - widened,
        "gradient buffers": buffer,
        "gather buffers": gathered,
        "activations": stage.activation_bytes,
        "recompute": stage.recompute_bytes,
        "offload buffers": stage.offload_bytes,
        "temporaries": max(0.0, stage.temporary_bytes - buffer),
        "messages": stage.message_bytes,
        "context": memory.context_bytes,
        "fragmentation": dynamic * memory.lost_share(overlap=stage.overlap),
    }
    return {cause: int(amount) for cause, amount in causes.items()}
