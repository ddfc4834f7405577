"""Tensors of one step: what segments received, made and still have to send, by (segment, micro-
batch).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import GradientEdge

from autopar.ir.deferral import Deferred
from autopar.ir.randomness import Drawing
from autopar.runtime.communicator import Work
from autopar.runtime.message_parts import Part
from autopar.runtime.parameter_unit import HeldGradients

Cell = tuple[int, int]
"""Segment and micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """Tensors that come from another stage (``works`` in flight) or from a segment of the same
    stage.

    ``parts`` are what tensor ranks receive of a message. They gather it when they wait, which all
    of them do in the same order.
    """

    tensors: tuple[Tensor, ...]
    works: tuple[Work, ...] = ()
    parts: tuple[Part | None, ...] = ()

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        if not self.parts:
            return self.tensors
        pairs = zip(self.tensors, self.parts, strict=True)
        return tuple(tensor if part is None else part.gather(tensor) for tensor, part in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """What backward needs of a forward: received leaves, and for each result its edge (None: takes
    no gradient). ``deferred`` is what its input part leaves for later.
    """

    leaves: tuple[Tensor, ...]
    edges: tuple[GradientEdge | None, ...]
    seed: Tensor | None
    deferred: Deferred | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """What the weight part of a backward needs of its input part: gradients of parameters that came
    with it, and how the others come.
    """

    held: HeldGradients
    deferred: Deferred


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What a step is given.

    Attributes:
        batch: Inputs by name: the global batch, or this rank's share of it if ``is_local``.
        checksum: Of the global batch, below 2^20; 0 where it is not compared.
        numbers: What random ops draw by; sequences and block are filled in later.
        loss_seed: The gradient of the loss with which backward starts.
    """

    batch: Mapping[str, Tensor]
    is_local: bool
    checksum: int
    numbers: Drawing
    loss_seed: float = 1.0


@dataclass(slots=True)
class StepState:
    """All that lives during a step and not after it.

    ``losses`` are those of micro-batches, each with what it counts; they and ``weights`` may get
    their values in backward (``ir.chunked_loss``).
    """

    activations: dict[Cell, Incoming] = field(default_factory=dict)
    gradients: dict[Cell, Incoming] = field(default_factory=dict)
    tapes: dict[Cell, Tape] = field(default_factory=dict)
    unfinished: dict[Cell, Unfinished] = field(default_factory=dict)
    outgoing: dict[Cell, tuple[Tensor, ...]] = field(default_factory=dict)
    outgoing_gradients: dict[Cell, tuple[Tensor, ...]] = field(default_factory=dict)
    sends: list[Work] = field(default_factory=list)
    losses: list[tuple[Tensor, float]] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    def add_sends(self, works: Sequence[Work]) -> None:
        """Keep sends in flight alive; those known to be done are dropped."""
        self.sends = [work for work in self.sends if not work.is_done()]
        self.sends.extend(works)
