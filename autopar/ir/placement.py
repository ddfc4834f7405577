"""States of a tensor on a mesh axis (I, R, S, P), their duals, and placements over several axes.

=========  ===================================  ===============================================
state      value on the ranks of the axis       its gradient
=========  ===================================  ===============================================
``I``      the same everywhere                  the same everywhere, complete (``I``)
``R``      the same everywhere                  a partial sum on each rank (``P``)
``S(d)``   a slice of dim ``d``                 the same slice
``P``      terms of a sum                       the whole gradient everywhere (``R``)
=========  ===================================  ===============================================

``S(d, 4:1:1)`` shards each of the blocks that dim ``d`` consists of (in proportions 4:1:1), so that
every rank holds a slice of every block: the fused query, key and value of attention, for example.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from autopar.ir.errors import InputError, PlacementError


class StateKind(Enum):
    """The four kinds of state."""

    INVARIANT = "I"
    REPLICATED = "R"
    SHARDED = "S"
    PARTIAL = "P"


@dataclass(frozen=True, slots=True)
class State:
    """State of a tensor on one mesh axis. ``dim`` and ``blocks`` belong to sharded states only.

    ``blocks`` are the proportions of the logical blocks of the dim, in lowest terms; ``(1,)`` is
    one block.
    """

    kind: StateKind
    dim: int = -1
    blocks: tuple[int, ...] = (1,)

    @property
    def is_sharded(self) -> bool:
        return self.kind is StateKind.SHARDED

    @property
    def is_whole(self) -> bool:
        """True when each rank holds the whole value (``I`` or ``R``)."""
        return self.kind in (StateKind.INVARIANT, StateKind.REPLICATED)

    def dual(self) -> State:
        """The state of this tensor's gradient."""
        if self.kind is StateKind.REPLICATED:
            return PARTIAL
        if self.kind is StateKind.PARTIAL:
            return REPLICATED
        return self

    def __str__(self) -> str:
        if not self.is_sharded:
            return self.kind.value
        blocks = "" if self.blocks == (1,) else ", " + ":".join(map(str, self.blocks))
        return f"S({self.dim}{blocks})"

    __repr__ = __str__


INVARIANT = State(StateKind.INVARIANT)
REPLICATED = State(StateKind.REPLICATED)
PARTIAL = State(StateKind.PARTIAL)


def sharded(dim: int, blocks: Sequence[int] = (1,)) -> State:
    """The state ``S(dim, blocks)``; proportions are brought to lowest terms."""
    if dim < 0:
        raise InputError(f"a sharded state needs a dim ≥ 0, not {dim}")
    if not blocks or any(block < 1 for block in blocks):
        raise InputError(f"blocks of a sharded dim must be positive, not {tuple(blocks)}")
    divisor = math.gcd(*blocks)
    return State(StateKind.SHARDED, dim, tuple(block // divisor for block in blocks))


_SHARDED_TEXT = re.compile(r"S\((\d+)(?:, ?(\d+(?::\d+)*))?\)")


@functools.cache
def parse_state(text: str) -> State:
    """The state written as ``I``, ``R``, ``P``, ``S(1)`` or ``S(2, 4:1:1)``."""
    plain = {"I": INVARIANT, "R": REPLICATED, "P": PARTIAL}.get(text)
    if plain is not None:
        return plain
    match = _SHARDED_TEXT.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is no state", hint="write I, R, P, S(dim) or S(dim, 1:1:1)")
    blocks = tuple(map(int, match[2].split(":"))) if match[2] else (1,)
    return sharded(int(match[1]), blocks)


Placement = tuple[State, ...]
"""States of one tensor, one per layout axis, in the order of ``autopar.ir.mesh.LAYOUT_AXES``."""


def shard_sizes(size: int, blocks: tuple[int, ...], num_ranks: int) -> tuple[int, ...] | None:
    """Sizes of one rank's slice of each block of a dim, or None when they do not divide evenly."""
    total = sum(blocks)
    if size % total:
        return None
    unit = size // total
    if any(unit * block % num_ranks for block in blocks):
        return None
    return tuple(unit * block // num_ranks for block in blocks)


def local_shape(
    shape: Sequence[int], placement: Placement, axis_sizes: Sequence[int]
) -> tuple[int, ...]:
    """The shape that one rank holds of a tensor.

    Raises:
        PlacementError: A dim does not divide into its shards.
    """
    local = list(shape)
    for state, num_ranks in zip(placement, axis_sizes, strict=True):
        if not state.is_sharded:
            continue
        if state.dim >= len(local):
            raise PlacementError(f"a tensor of shape {tuple(shape)} has no dim for {state}")
        shares = shard_sizes(local[state.dim], state.blocks, num_ranks)
        if shares is None:
            raise PlacementError(
                f"dim {state.dim} of size {local[state.dim]} does not divide into {state} over "
                f"{num_ranks} ranks"
            )
        local[state.dim] = sum(shares)
    return tuple(local)
