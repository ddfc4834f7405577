"""Ranks of a mesh in any order of its axes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.errors import InputError
from autopar.ir.mesh import MESH_AXES, PIPELINE_AXIS, Mesh

SIZES = st.sampled_from([1, 1, 2, 3])
MESHES = st.builds(
    Mesh,
    pp=SIZES,
    dp_replicate=SIZES,
    dp_shard=SIZES,
    cp=SIZES,
    ep=SIZES,
    tp=SIZES,
    axis_order=st.permutations(MESH_AXES).map(tuple),
)


@given(mesh=MESHES)
def test_ranks_have_one_place_each_in_any_order_of_axes(mesh: Mesh) -> None:
    ranks = [
        mesh.rank_at(pp=pp, dp=dp, cp=cp, ep=ep, tp=tp)
        for pp, dp, cp, ep, tp in itertools.product(
            *map(range, (mesh.pp, mesh.dp, mesh.cp, mesh.ep, mesh.tp))
        )
    ]
    assert sorted(ranks) == list(range(mesh.num_ranks))
    for rank in ranks:
        at = mesh.coordinates(rank)
        names = ("pp", "dp", "cp", "ep", "tp")
        assert mesh.rank_at(**{name: at[name] for name in names}) == rank
        for axis in MESH_AXES:
            if at[axis] + 1 < mesh.size(axis):
                after = mesh.coordinates(rank + mesh.stride(axis))
                moved = {axis: at[axis] + 1}
                assert {own: after[own] for own in MESH_AXES} == {
                    own: moved.get(own, at[own]) for own in MESH_AXES
                }


@given(mesh=MESHES)
def test_groups_are_in_the_order_of_their_coordinates(mesh: Mesh) -> None:
    for axis in mesh.group_axes():
        groups = mesh.groups(axis)
        assert sorted(itertools.chain.from_iterable(groups)) == list(range(mesh.num_ranks))
        for ranks in groups:
            places = [mesh.coordinates(rank) for rank in ranks]
            ordered = [tuple(at[name] for name in MESH_AXES) for at in places]
            assert ordered == sorted(ordered)


@given(mesh=MESHES)
def test_ranks_of_a_stage_are_numbered_alike_on_all_stages(mesh: Mesh) -> None:
    for rank in range(mesh.num_ranks):
        stages = [mesh.on_stage(rank, stage) for stage in range(mesh.pp)]
        assert [mesh.coordinates(other)[PIPELINE_AXIS] for other in stages] == list(range(mesh.pp))
        assert len({mesh.place_on_stage(other) for other in stages}) == 1
    of_first = [r for r in range(mesh.num_ranks) if mesh.coordinates(r)[PIPELINE_AXIS] == 0]
    assert [mesh.place_on_stage(rank) for rank in of_first] == list(range(len(of_first)))


def test_an_order_of_other_axes_is_refused() -> None:
    with pytest.raises(InputError, match="each once; its order is pp, pp"):
        Mesh(axis_order=("pp", "pp", "dp_shard", "cp", "ep", "tp"))
