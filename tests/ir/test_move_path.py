"""Move paths lead from any placement to any other and keep value and gradient."""

from __future__ import annotations

import itertools

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from autopar.ir.graph import Role, ValueId
from autopar.ir.mesh import LAYOUT_AXES, Mesh
from autopar.ir.move_path import is_legal_step, move_path
from autopar.ir.moves import Collective, collective_of, move
from autopar.ir.placement import (
    INVARIANT,
    PARTIAL,
    REPLICATED,
    Placement,
    parse_state,
    sharded,
)
from tests.passes.harness import combine, on_grid, place

STATES = (INVARIANT, REPLICATED, PARTIAL, sharded(0), sharded(1), sharded(1, (2, 1)))
placements = st.tuples(st.sampled_from(STATES), st.sampled_from(STATES))
meshes = st.sampled_from([Mesh(dp_shard=2, tp=2), Mesh(dp_shard=3, tp=2), Mesh(dp_shard=2, tp=4)])
VALUE = ValueId(Role.INPUT, "x")
GRADIENT = ValueId(Role.INPUT, "g")


def placed(text: str) -> Placement:
    """States on two axes."""
    return tuple(parse_state(state) for state in text.split(" "))


def over_mesh(placement: Placement) -> Placement:
    """A placement on the data and the tensor axis over all axes."""
    outer, inner = placement
    return (outer, *[INVARIANT] * (len(LAYOUT_AXES) - 2), inner)


@given(source=placements, target=placements, mesh=meshes)
@example(source=placed("S(0) S(0)"), target=placed("R S(0)"), mesh=Mesh(dp_shard=2, tp=2))
@example(source=placed("S(0) S(1)"), target=placed("S(1) S(0)"), mesh=Mesh(dp_shard=2, tp=2))
def test_paths_keep_value_and_gradient(source: Placement, target: Placement, mesh: Mesh):
    source, target = over_mesh(source), over_mesh(target)
    path = move_path(source, target, mesh.layout_sizes(), requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(24, 72, generator=generator, dtype=torch.float64)
    gradient = torch.randn(24, 72, generator=generator, dtype=torch.float64)
    dual = tuple(state.dual() for state in target)

    def step(groups):
        at = tuple(groups[axis] for axis in LAYOUT_AXES)
        leaf = place(value, source, at).detach().clone().requires_grad_()
        moved = leaf
        for taken in path:
            moved = move(moved, at[taken.axis], str(taken.source), str(taken.target))
        moved.backward(place(gradient, dual, at))
        assert leaf.grad is not None
        return {VALUE: moved.detach(), GRADIENT: leaf.grad}

    grid = on_grid(mesh, step)
    moved = combine([rank[VALUE] for rank in grid], target, mesh.layout_sizes(), "value")
    back = combine(
        [rank[GRADIENT] for rank in grid],
        tuple(state.dual() for state in source),
        mesh.layout_sizes(),
        "gradient",
    )
    torch.testing.assert_close(moved, value)
    torch.testing.assert_close(back, gradient)


@given(source=placements, target=placements)
def test_steps_are_legal_and_connected(source: Placement, target: Placement):
    at = source
    for step in move_path(source, target, (2, 4), requires_grad=False):
        assert at[step.axis] == step.source
        assert is_legal_step(at, step.axis, step.target)
        at = step.reached
    assert at == target


def test_an_unchanged_placement_needs_no_step():
    for placement in itertools.product(STATES, STATES):
        assert move_path(placement, placement, (2, 2), requires_grad=True) == ()


def test_a_change_on_one_axis_is_one_step():
    path = move_path(placed("S(0) P"), placed("S(0) S(1)"), (2, 2), requires_grad=True)
    assert [(step.axis, str(step.target)) for step in path] == [(1, "S(1)")]


def test_bytes_are_reduced_before_they_are_gathered():
    """Reducing a shard and gathering it is less traffic than reducing what was gathered."""
    path = move_path(placed("S(0) P"), placed("R I"), (4, 4), requires_grad=False)
    collectives = [collective_of(step.source, step.target) for step in path]
    assert collectives == [Collective.ALL_REDUCE, Collective.ALL_GATHER]
