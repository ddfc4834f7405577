"""Local graphs have the shapes of one rank, and are held to them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from autopar.ir.errors import PlacementError
from autopar.ir.graph import BATCH, Role, info, set_info
from autopar.ir.layout import NodeTyping
from autopar.ir.mesh import Mesh
from autopar.passes.base import TypedKind
from autopar.passes.localize import localize
from autopar.passes.verify_shapes import ShapeGroup, verify_shapes
from autopar.runtime.threads import run_ranks, thread_groups
from tests.passes.harness import placed
from tests.passes.random_models import aten
from tests.strategies import KindBuilder

MESH = Mesh(dp_shard=2, tp=3)


def heads() -> TypedKind:
    """``[b, 6, 24]`` as ``[b, 6, 6, 4]``, the batch split over dp and the heads over tp."""
    builder = KindBuilder()
    x = builder.placeholder("x", (BATCH, 6, 24), role=Role.ACTIVATION)
    split = builder.call(aten.reshape.default, x, [BATCH, 6, 6, 4])
    layout = {
        x.name: NodeTyping(operands=(), results=(placed("S(0) S(2)"),)),
        split.name: NodeTyping(operands=(placed("S(0) S(2)"),), results=(placed("S(0) S(2)"),)),
        "output": NodeTyping(operands=(placed("S(0) S(2)"),), results=()),
    }
    return TypedKind(kind=builder.build("kind", [split]), layout=layout)


def test_shapes_and_shape_arguments_become_those_of_one_rank():
    kind = localize(heads(), mesh=MESH, batch=4)
    x, split = kind.placeholders[0], kind.outputs[0]
    assert info(x).tensor.shape == (2, 6, 8)
    assert info(split).tensor.shape == (2, 6, 2, 4)
    assert list(split.args[1]) == [2, 6, 2, 4]  # type: ignore[arg-type]


def test_the_global_graph_is_left_alone():
    typed = heads()
    localize(typed, mesh=MESH, batch=4)
    assert info(typed.kind.outputs[0]).tensor.shape == (BATCH, 6, 6, 4)


def test_a_wrong_local_shape_is_caught():
    kind = localize(heads(), mesh=MESH, batch=4)
    node = kind.outputs[0]
    tensor = dataclasses.replace(info(node).tensor, shape=(2, 6, 6, 4))
    set_info(node, dataclasses.replace(info(node), tensors=(tensor,)))
    with pytest.raises(PlacementError, match=r"reshape_default in kind gives .*\(2, 6, 2, 4\)"):
        verify_shapes(kind, MESH)


def test_a_local_form_that_refuses_its_operands_is_caught():
    kind = localize(heads(), mesh=MESH, batch=4)
    node = kind.outputs[0]
    node.args = (node.args[0], [2, 6, 6, 4])
    with pytest.raises(PlacementError, match="reshape_default refuses its operands"):
        verify_shapes(kind, MESH)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_shape_groups_give_the_shapes_of_real_collectives(name: str):
    groups = thread_groups("tp", 3)
    tensor = torch.zeros(6, 5)
    (real, *_) = run_ranks(3, lambda rank: getattr(groups[rank], name)(tensor))
    shaped = getattr(ShapeGroup("tp", 3), name)(tensor.to("meta"))
    assert (shaped.shape, shaped.dtype) == (real.shape, real.dtype)
