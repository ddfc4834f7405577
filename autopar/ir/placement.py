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

``S(d, 50257 padded)`` shards a dim of 50257 that the ranks do not divide: each holds as many rows,
and what the last ones have beyond the end is padding. Its values are finite and never read, and its
gradient is zero: ops that would read it have no option with such states.
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
    """State of a tensor on one mesh axis. All but ``kind`` belongs to sharded states only.

    ``blocks`` are the proportions of the logical blocks of the dim, in lowest terms; ``(1,)`` is
    one block. ``padded_size`` is the logical size of a dim whose shards are padded to be equal,
    0 where the dim divides.
    """

    kind: StateKind
    dim: int = -1
    blocks: tuple[int, ...] = (1,)
    padded_size: int = 0

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
        if self.padded_size:
            return f"S({self.dim}, {self.padded_size} padded)"
        blocks = "" if self.blocks == (1,) else ", " + ":".join(map(str, self.blocks))
        return f"S({self.dim}{blocks})"

    def shares(self, size: int, num_ranks: int) -> tuple[int, ...] | None:
        """Sizes of one rank's slice of each block of a dim of ``size``, or None when they do not
        divide evenly.
        """
        if self.padded_size:
            return (-(-size // num_ranks),) if size == self.padded_size else None
        return shard_sizes(size, self.blocks, num_ranks)

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


def padded(dim: int, size: int) -> State:
    """The state ``S(dim, size padded)`` of a dim of ``size``."""
    return State(StateKind.SHARDED, dim, padded_size=size)


_SHARDED_TEXT = re.compile(r"S\((\d+)(?:, ?(\d+(?::\d+)*))?( padded)?\)")


@functools.cache
def parse_state(text: str) -> State:
    """The state written as ``I``, ``R``, ``P``, ``S(1)``, ``S(2, 4:1:1)`` or ``S(0, 9 padded)``."""
    plain = {"I": INVARIANT, "R": REPLICATED, "P": PARTIAL}.get(text)
    if plain is not None:
        return plain
    match = _SHARDED_TEXT.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is no state", hint="write I, R, P, S(dim) or S(dim, 1:1:1)")
    if match[3]:
        if not match[2] or not match[2].isdigit() or int(match[2]) < 1:
            raise InputError(f"{text!r} is no state", hint="write S(dim, size padded)")
        return padded(int(match[1]), int(match[2]))
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
        shares = state.shares(local[state.dim], num_ranks)
        if shares is None:
            raise PlacementError(
                f"dim {state.dim} of size {local[state.dim]} does not divide into {state} over "
                f"{num_ranks} ranks"
            )
        local[state.dim] = sum(shares)
    return tuple(local)
