"""Bytes on the fullest moment of a rank, by cause.

======================  ==========================================================================
parameters              in the dtype of compute; ZeRO 3 keeps a shard
master weights          fp32 beside bf16 parameters; ZeRO ≥ 1 keeps a shard (beside gathered ones)
optimizer               two moments for Adam and AdamW, as master weights
gradients               accumulated in fp32 (float64: in float64); ZeRO ≥ 2 keeps a shard
gradient buffers        a segment's gradients before they are added or reduced
gather buffers          ZeRO 3: the gathered parameters of two segments
activations             what autograd keeps, or the inputs of recomputed blocks, of all
                        micro-batches in flight
recompute               what autograd keeps of the one block that is recomputed
temporaries             the op that needs most beside what is kept: logits, as a rule
messages                activations and gradients on their way between stages
context, fragmentation  from the hardware file
======================  ==========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.plan import TrainingPlan
from autopar.solver.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Itemsizes:
    """Bytes per parameter element, by what holds them."""

    compute: int
    master: int  # 0 where the parameters are the master weights
    moments: int
    gradient: int


def itemsizes(training: TrainingPlan) -> Itemsizes:
    """Bytes per element under a precision and an optimizer."""
    compute = {"bf16": 2, "fp32": 4, "float64": 8}[training.precision]
    wide = max(4, compute)
    return Itemsizes(
        compute=compute,
        master=wide if compute < wide else 0,
        moments=0 if training.optimizer == "sgd" else 2 * wide,
        gradient=wide,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContents:
    """What a rank of a stage holds.

    Attributes:
        numel: Elements of its parameters, sharded over the tensor axis only.
        segment_numel: Elements of the parameters of its largest segment.
        num_segments: Segments on the stage.
        activation_bytes: Of all micro-batches in flight.
        recompute_bytes: Of the block that is recomputed.
        temporary_bytes: Of the op that needs most.
        message_bytes: One message at each border of the stage.
    """

    numel: float
    segment_numel: float
    num_segments: int
    activation_bytes: float
    recompute_bytes: float
    temporary_bytes: float
    message_bytes: float


def rank_bytes(
    stage: StageContents,
    *,
    sizes: Itemsizes,
    zero_stage: int,
    dp_shard: int,
    layered: bool,
    hardware: Hardware,
) -> dict[str, int]:
    """Bytes by cause; their sum is the peak."""
    shard = dp_shard if zero_stage >= 1 else 1
    stored = stage.numel / (dp_shard if zero_stage == 3 else 1)
    accumulated = stage.numel / (dp_shard if zero_stage >= 2 else 1)
    # With fp32 compute, ZeRO 1 and 2 hold their shard beside the gathered parameters.
    master = sizes.master or (sizes.compute if zero_stage in (1, 2) and dp_shard > 1 else 0)
    gathered = 0.0
    if zero_stage == 3 and dp_shard > 1:
        gathered = stage.segment_numel * min(2, stage.num_segments) * sizes.compute
    buffer = stage.segment_numel * sizes.compute
    if zero_stage >= 2 and dp_shard > 1:
        buffer += (
            stage.segment_numel * sizes.gradient * (min(2, stage.num_segments) if layered else 1)
        )
    dynamic = (
        stage.activation_bytes
        + stage.recompute_bytes
        + stage.temporary_bytes
        + stage.message_bytes
        + gathered
        + buffer
    )
    causes: dict[str, float] = {
        "parameters": stored * sizes.compute,
        "master weights": stage.numel / shard * master,
        "optimizer": stage.numel / shard * sizes.moments,
        "gradients": accumulated * sizes.gradient,
        "gradient buffers": buffer,
        "gather buffers": gathered,
        "activations": stage.activation_bytes,
        "recompute": stage.recompute_bytes,
        "temporaries": stage.temporary_bytes,
        "messages": stage.message_bytes,
        "context": hardware.memory.context_bytes,
        "fragmentation": dynamic * hardware.memory.fragmentation,
    }
    return {cause: int(amount) for cause, amount in causes.items()}
