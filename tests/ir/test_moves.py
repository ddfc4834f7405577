"""A move keeps value and gradient, and its backward is the move between the duals."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from autopar.ir.moves import Collective, backward_of, collective_of, move, transfer
from autopar.ir.placement import INVARIANT, PARTIAL, REPLICATED, State, sharded
from autopar.runtime.threads import ThreadGroup, run_ranks, thread_groups
from autopar.testing.shards import collect, distribute

_BLOCKS = ((1,), (1, 1), (2, 1, 1))


@st.composite
def moves(draw: st.DrawFn) -> tuple[int, State, State, list[int]]:
    """Number of ranks, two states, and a shape that both divide."""
    size = draw(st.integers(1, 4))
    num_dims = draw(st.integers(0, 3))
    plain = [INVARIANT, REPLICATED, PARTIAL]
    shards = [sharded(dim, blocks) for dim in range(num_dims) for blocks in _BLOCKS]
    source, target = (draw(st.sampled_from(plain + shards)) for _ in range(2))
    shape = [draw(st.integers(1, 3)) for _ in range(num_dims)]
    for state in (source, target):
        if state.is_sharded:
            shape[state.dim] = 4 * size * (shape[state.dim] % 2 + 1)  # all of _BLOCKS divide it
    return size, source, target, shape


def _on_ranks(
    parts: list[Tensor], source: State, target: State, seeds: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """On each rank, the moved tensor and the gradient of what was moved."""
    groups = thread_groups("tp", len(parts))

    def run(rank: int) -> tuple[Tensor, Tensor]:
        operand = parts[rank].clone().requires_grad_()
        moved = move(operand, groups[rank], str(source), str(target))
        (gradient,) = torch.autograd.grad(moved, operand, seeds[rank])
        return moved.detach(), gradient

    return run_ranks(len(parts), run)


@given(moves(), st.integers(0, 1000))
@example((2, sharded(0, (2, 1, 1)), sharded(0), [8]), 0)
@example((3, sharded(1, (1, 1)), sharded(0, (2, 1, 1)), [12, 12, 1]), 0)
def test_moves_keep_values_and_gradients(
    case: tuple[int, State, State, list[int]], seed: int
) -> None:
    size, source, target, shape = case
    generator = torch.Generator().manual_seed(seed)
    whole, gradient = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    parts = distribute(whole, (source,), [size], generator)
    seeds = distribute(gradient, (target.dual(),), [size], generator)
    outcomes = _on_ranks(parts, source, target, seeds)
    values, gradients = ([outcome[index] for outcome in outcomes] for index in range(2))
    torch.testing.assert_close(collect(values, (target,), [size]), whole)
    torch.testing.assert_close(collect(gradients, (source.dual(),), [size]), gradient)


@given(moves(), st.integers(0, 1000))
def test_backward_of_a_move_is_the_move_of_the_duals_reversed(
    case: tuple[int, State, State, list[int]], seed: int
) -> None:
    size, source, target, shape = case
    generator = torch.Generator().manual_seed(seed)
    whole, gradient = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    parts = distribute(whole, (source,), [size], generator)
    seeds = distribute(gradient, (target.dual(),), [size], generator)
    outcomes = _on_ranks(parts, source, target, seeds)
    groups = thread_groups("tp", size)

    def reversed_move(rank: int) -> Tensor:
        return transfer(seeds[rank], groups[rank], *backward_of(source, target))

    for (_, found), expected in zip(outcomes, run_ranks(size, reversed_move), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@given(moves())
def test_the_backward_of_the_backward_is_the_move(
    case: tuple[int, State, State, list[int]],
) -> None:
    _, source, target, _ = case
    assert backward_of(*backward_of(source, target)) == (source, target)
    assert source.dual().dual() == source


class _Counting:
    """A group that counts collectives."""

    def __init__(self, group: ThreadGroup) -> None:
        self.group = group
        self.issued: list[Collective] = []
        self.name, self.rank, self.size = group.name, group.rank, group.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.issued.append(Collective.ALL_REDUCE)
        return self.group.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.issued.append(Collective.ALL_GATHER)
        return self.group.all_gather(tensor)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        self.issued.append(Collective.REDUCE_SCATTER)
        return self.group.reduce_scatter(tensor)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        self.issued.append(Collective.ALL_TO_ALL)
        return self.group.all_to_all(tensor)


@given(moves())
def test_a_move_issues_the_collective_that_it_is_said_to(
    case: tuple[int, State, State, list[int]],
) -> None:
    size, source, target, shape = case
    groups = [_Counting(group) for group in thread_groups("tp", size)]
    whole = torch.randn(shape, dtype=torch.float64)
    parts = distribute(whole, (source,), [size], torch.Generator())
    run_ranks(size, lambda rank: transfer(parts[rank], groups[rank], source, target))  # type: ignore[arg-type]
    said = collective_of(source, target)
    expected = [] if said is Collective.NONE or size == 1 else [said]
    assert all(group.issued == expected for group in groups)
