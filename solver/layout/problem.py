"""The placement problem of one mesh axis, as data: which option each op takes, and what that costs.

One copy of each kind of block. Symbols, used in the same way in ``build`` and in the docs:

======================  ===========================================================================
``u[o, k]``             op *o* takes option *k*
``x[v, s]``             value *v* is produced in state *s*
``w[c, s, t]``          consumer *c* takes its value, which is in state *s*, in state *t*
``z[v, s, t]``          some consumer takes *v* so: the move ``s → t`` is made
``y[c, s]``             all values of class *c* have state *s*
``h[q]``                the tensor *q* is held for backward
======================  ===========================================================================

A *class* is a set of placeholders and block results that must agree: a parameter in all its uses,
or an activation wherever blocks hand it on. A *value* is a result of an op, or a placeholder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.placement import State
from autopar.ir.rules.core import Option
from autopar.solver.layout.frame import ClassRole, Delivery, Frame


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Seconds of a move in one micro-batch, and its bytes if the moved copy has to be kept."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateClass:
    """Placeholders and results that have one state.

    Attributes:
        states: The states that they may have.
        step_s: Seconds per step that a state costs (reduction of gradients), all members together.
        numel: Elements of one member on a rank, by state.
        num_members: Parameters of the class in the whole model (0 for other roles).
        outer: Moves on typed axes in a block of each kind, by state; kinds without any left out.
    """

    role: ClassRole
    states: tuple[State, ...]
    step_s: tuple[float, ...]
    numel: tuple[int, ...]
    num_members: int
    outer: Mapping[int, tuple[MoveCost, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor of a kind: result ``result`` of node ``node``.

    Attributes:
        kind: Index of the kind.
        states: The states in which it may be produced.
        demanded: The states in which consumers may demand it.
        moves: Cost of each (state, demanded state) by their indices.
        state_class: Its class if it is a placeholder, else None.
    """

    kind: int
    node: str
    result: int
    states: tuple[State, ...]
    demanded: tuple[State, ...]
    moves: Mapping[tuple[int, int], MoveCost]
    state_class: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpOption:
    """An option with its costs: seconds per micro-batch, collectives in it included and apart, with
    what typed axes send of its results.

    ``held`` are the tensors that autograd keeps when the op takes this option. The host launches
    the op's kernels in ``forward_launch_s`` and ``backward_launch_s``. The parts of backward in
    which the op is computed again are ``again_s`` and ``again_launch_s``; ``rebuilt_bytes`` are
    there then. Of a backward in two parts ``weight_s`` is in the
    weight part, until which the op keeps ``waiting_bytes``, and its operands ``waiting``.
    """

    option: Option
    forward_s: float
    backward_s: float
    forward_comm_s: float
    backward_comm_s: float
    transient_bytes: int
    held: tuple[int, ...]
    forward_launch_s: float = 0.0
    backward_launch_s: float = 0.0
    again_s: float = 0.0
    again_launch_s: float = 0.0
    rebuilt_bytes: int = 0
    weight_s: float = 0.0
    waiting_bytes: int = 0
    waiting: tuple[tuple[int, int], ...] = ()  # place among the operands, and bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A node that chooses an option. ``operands`` and ``results`` are indices of values."""

    kind: int
    node: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    options: tuple[OpOption, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A tensor in a state that may be kept for backward, counted once whoever keeps it; or one that
    backward gathers again instead.

    Attributes:
        tensor: Its value, or a negative number of its own for what only the op knows (a mask).
        made: The value whose state says whether it costs anything: parameters themselves are
            accounted for elsewhere, what is computed again is not kept, and what is gathered again
            only from its shards.
        free: States of that value in which it does not.
        again_s, rebuilt_bytes: Of what backward gathers again: seconds in which that is done, and
            what is there then.
        gather_s: Seconds in which it could be gathered again instead of being kept, at the least.
    """

    kind: int
    num_bytes: int
    tensor: int
    made: int | None
    free: frozenset[int] = frozenset()
    again_s: float = 0.0
    rebuilt_bytes: int = 0
    gather_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """All choices on one axis, for one copy of each kind of block, with their costs.

    Attributes:
        frame: The choices by themselves, which problems of other micro-batch sizes share.
    """

    frame: Frame = field(repr=False)
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    classes: tuple[StateClass, ...]
    held: tuple[Held, ...]

    @property
    def axis(self) -> str:
        return self.frame.axis

    @property
    def axis_size(self) -> int:
        return self.frame.size

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds, in order of the model."""
        return self.frame.kinds

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of blocks of each kind."""
        return self.frame.counts

    @property
    def deliveries(self) -> tuple[Delivery, ...]:
        return self.frame.deliveries


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """A limit: Σ over kinds of copies · held bytes, plus bytes of parameters, ≤ ``num_bytes``.

    Attributes:
        copies: For each kind, blocks × micro-batches whose held tensors live at once.
        parameter_bytes: For each class, bytes per element times the number of its members.
    """

    name: str
    num_bytes: int
    copies: tuple[float, ...]
    parameter_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The objective: over kinds, ``forward`` · seconds forward + ``backward`` · seconds backward.

    Plus ``step`` · seconds once a step, plus over kinds ``held`` · bytes held, plus over classes
    ``parameters`` · elements. Of backwards in two parts: plus ``input`` · seconds of input parts,
    and ``waiting`` · bytes kept between the parts, operands of several ops shared among them (by
    default neither).
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    step: float
    held: tuple[float, ...]
    parameters: tuple[float, ...]
    input: tuple[float, ...] = ()
    waiting: tuple[float, ...] = ()


TIE_BREAK_S_PER_BYTE = 1e-18
"""Of layouts that are equally fast, the one that keeps less: a microsecond for a terabyte."""


def all_blocks_once(problem: Problem, *, held_s_per_byte: float = 0.0) -> Weights:
    """Seconds of one forward and one backward of all blocks, and of each byte that is held."""
    counts = tuple(map(float, problem.counts))
    return Weights(
        forward=counts,
        backward=counts,
        step=0.0,
        held=tuple(held_s_per_byte * count for count in counts),
        parameters=(0.0,) * len(problem.classes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What a solve found. ``choices`` is the option of each op, ``states`` the state of each class.

    Attributes:
        status: ``optimal``, ``feasible`` or ``infeasible``.
        objective: Value of ``Weights`` in seconds; infinite when there is no solution.
        bound: Proved lower bound of the objective.
        seconds: Wall time of building and solving.
    """

    status: str
    objective: float
    bound: float
    seconds: float
    choices: tuple[int, ...]
    states: tuple[int, ...]

    @property
    def gap(self) -> float:
        """1 − bound / objective."""
        return 0.0 if self.objective <= 0 else max(0.0, 1 - self.bound / self.objective)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCost:
    """What one block of a kind costs under a layout, per micro-batch.

    Attributes:
        forward_s, backward_s: Seconds, collectives of the axis included.
        forward_comm_s, backward_comm_s: The part of the collectives.
        held_bytes: What autograd keeps.
        rebuilt_bytes: What is there beside it when backward has computed single ops again.
        transient_bytes: The most that one op needs beside what is kept.
        weight_s, waiting_bytes: Of a backward in two parts, what of ``backward_s`` is the weight
            part, and what is kept until then.
        forward_launch_s, backward_launch_s: What the host needs to launch all kernels: the block
            takes no less.
        again_s, again_launch_s: The part of backward that computes single ops again.
    """

    forward_s: float
    backward_s: float
    forward_comm_s: float
    backward_comm_s: float
    held_bytes: int
    transient_bytes: int
    rebuilt_bytes: int = 0
    weight_s: float = 0.0
    waiting_bytes: int = 0
    forward_launch_s: float = 0.0
    backward_launch_s: float = 0.0
    again_s: float = 0.0
    again_launch_s: float = 0.0
