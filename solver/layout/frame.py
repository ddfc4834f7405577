"""The placement problem of one mesh axis before any cost: what can be chosen, and what follows.

A frame is the same for every micro-batch size of an axis that does not share the batch, and for
every cluster; ``price`` makes a problem of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import fx

from autopar.ir.graph import Role, TensorInfo
from autopar.ir.placement import State
from autopar.ir.rules.core import Option
from autopar.solver.layout.outer import NodeView, OuterAxes


class ClassRole(Enum):
    """What the members of a class are."""

    PARAMETER = "parameter"
    BOUNDARY = "boundary"
    INPUT = "input"  # inputs and constants of the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Block result: the value is handed on in the state of the class."""

    kind: int
    value: int
    state_class: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameClass:
    """Placeholders and results that have one state; ``num_members`` are parameters of the model."""

    role: ClassRole
    tensor: TensorInfo
    states: tuple[State, ...]
    num_members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameValue:
    """Result ``result`` of node ``node``; ``moves`` are the moves that there are, by indices of
    states and demanded states. ``alike`` is the same number for all values of a model that are
    moved in the same ways at the same costs.
    """

    kind: int
    node: str
    result: int
    tensor: TensorInfo
    role: Role | None
    states: tuple[State, ...]
    demanded: tuple[State, ...]
    moves: tuple[tuple[int, int], ...]
    state_class: int | None
    alike: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameOp:
    """A node and its options.

    Attributes:
        operands, results: Indices of values.
        held: For each option, the tensors that autograd keeps.
        weights: Operands whose gradients can be computed apart, later (``ir.weight_parts``).
        is_again: Whether backward computes it again by itself.
        is_rebuilt: Whether backward then reads its results.
        alike: The same number for all ops of a model that cost the same in the same options.
        sends: Whether axes that are typed already send something for it.
    """

    kind: int
    node: fx.Node
    view: NodeView
    operands: tuple[int, ...]
    results: tuple[int, ...]
    options: tuple[Option, ...]
    held: tuple[tuple[int, ...], ...]
    is_again: bool
    is_rebuilt: bool
    weights: tuple[int, ...]
    alike: int
    sends: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptValue:
    """A value in a state, ``copies`` times as large as it was made."""

    tensor: TensorInfo
    state: State
    copies: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptInside:
    """What only the op knows, a mask say, under an option."""

    node: fx.Node
    view: NodeView
    option: Option


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredAgain:
    """A value that is not kept whole: backward gathers it from its shards."""

    tensor: TensorInfo
    source: State
    target: State


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeld:
    """A tensor that may be kept for backward; see ``problem.Held``."""

    kind: int
    tensor: int
    made: int | None
    free: frozenset[int]
    what: KeptValue | KeptInside | GatheredAgain


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Frame:
    """All choices on an axis of ``size`` ranks. ``outer`` are the axes that are typed already."""

    axis: str
    size: int
    outer: OuterAxes
    kinds: tuple[str, ...]
    counts: tuple[int, ...]
    values: tuple[FrameValue, ...]
    ops: tuple[FrameOp, ...]
    classes: tuple[FrameClass, ...]
    held: tuple[FrameHeld, ...]
    deliveries: tuple[Delivery, ...]
