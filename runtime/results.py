"""What a step gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One training step; the same on every rank, but for ``seconds``.

    Attributes:
        loss: Σ loss / Σ weight over the global batch.
        grad_norm: Of all gradients, before clipping.
        num_tokens: Valid tokens of the batch (sequences, if the loss is no sum over tokens).
        seconds: Of this step on this rank.
        skipped: True if gradients overflowed fp16: nothing was updated, and the loss scale is
            halved.
        loss_scale: By which the loss was multiplied; 1 but for fp16.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    seconds: float
    skipped: bool = False
    loss_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The loss of a batch; the same on every rank, but for ``seconds``. For the attributes see
    ``StepResult``.
    """

    loss: float
    num_tokens: int
    seconds: float
