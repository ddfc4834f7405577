"""Random numbers by logical position: the same at every layout.

A number depends on the seed, the step, the sequence (its index in the global batch), the block, the
op within the block, and its position in that op's tensor of one sequence; on nothing else. So masks
are alike at any degree of parallelism, micro-batch size, schedule, stage cut and recomputation, and
on one device. What belongs to no sequence (a tensor without batch dim) is drawn once for all.

Every rank draws the whole tensors of the sequences that it needs, and takes its shard of them.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.axis_group import AxisGroup
from autopar.ir.moves import take_shard
from autopar.ir.placement import State, parse_state, sharded


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """For what numbers are drawn.

    Attributes:
        seed: Of the training run.
        step: Steps before this one.
        sequences: Index in the global batch of every sequence of the global micro-batch, in its
            order.
        block: Index of the block that runs.
    """

    seed: int
    step: int
    sequences: tuple[int, ...]
    block: int = -1

    def seed_of(self, op: str, sequence: int | None) -> int:
        """The seed of an op's numbers for one sequence, or for all (None)."""
        key = (self.seed, self.step, sequence, self.block, op)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1  # generators take 63 bits


_current = threading.local()


@contextmanager
def drawing(numbers: Drawing) -> Iterator[None]:
    """While active, ops of this thread draw ``numbers``.

    What autograd computes again in backward may run in another thread: enter it there too.
    """
    before: Drawing | None = getattr(_current, "drawing", None)
    _current.drawing = numbers
    try:
        yield
    finally:
        _current.drawing = before


Sample = Callable[[tuple[int, ...], torch.Generator], Tensor]
"""``sample(shape, generator)`` draws a tensor on the generator's device."""

Shards = Sequence[tuple[AxisGroup, str]]
"""Axes that shard a tensor, the outermost first, each with the tensor's state on it, as text."""


def draw(
    sample: Sample,
    *,
    op: str,
    shape: Sequence[int],
    batch_dim: int | None,
    shards: Shards,
    device: torch.device,
) -> Tensor:
    """This rank's shard of the logical tensor that ``sample`` draws.

    Args:
        op: Name of the op within its block.
        shape: Of one sequence's logical tensor.
        batch_dim: The dim along which sequences follow one another; None: there is one tensor.
        shards: How the tensor is sharded.
        device: Where the numbers are drawn; the numbers of one kind of device are not another's.
    """
    now: Drawing | None = getattr(_current, "drawing", None)
    assert now is not None, f"{op} draws random numbers, but nobody says for what (see drawing)"
    states = [(axis, parse_state(state)) for axis, state in shards]

    def numbers(sequence: int | None) -> Tensor:
        generator = torch.Generator(device).manual_seed(now.seed_of(op, sequence))
        drawn = sample(tuple(shape), generator)
        return _take(drawn, [(axis, state) for axis, state in states if state.dim != batch_dim])

    if batch_dim is None:
        return numbers(None)
    size = shape[batch_dim]
    along = [(axis, sharded(0, state.blocks)) for axis, state in states if state.dim == batch_dim]
    whole = torch.arange(size * len(now.sequences), device="cpu")  # plain numbers, wherever we run
    rows = _take(whole, along).tolist()
    needed = list(dict.fromkeys(row // size for row in rows))
    drawn = torch.cat([numbers(now.sequences[index]) for index in needed], batch_dim)
    position = {index: start * size for start, index in enumerate(needed)}
    order = [position[row // size] + row % size for row in rows]
    if order == list(range(drawn.shape[batch_dim])):
        return drawn
    return drawn.index_select(batch_dim, torch.tensor(order, device=device))


def _take(tensor: Tensor, states: Sequence[tuple[AxisGroup, State]]) -> Tensor:
    for axis, state in states:
        tensor = take_shard(tensor, state, axis.rank, axis.size)
    return tensor
