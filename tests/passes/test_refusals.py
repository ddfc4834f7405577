"""A layout that is wrong is refused before anything runs, with the op or value that is at fault."""

from __future__ import annotations

import pytest

from autopar.ir.errors import InputError, PlacementError
from autopar.ir.graph import BATCH, Role
from autopar.ir.layout import KindLayout, Layout, NodeTyping
from autopar.ir.mesh import Mesh
from autopar.ir.placement import INVARIANT
from autopar.ir.plan import SegmentPlan
from autopar.ir.program import Program
from autopar.passes import lower
from autopar.passes.base import TypedKind
from autopar.passes.pipeline import run_passes
from tests.passes.harness import placed
from tests.passes.layouts import replicated
from tests.passes.random_models import aten, random_model
from tests.strategies import KindBuilder

MODEL = random_model(0, layers=1)
MESH = Mesh(dp_shard=2, tp=2)


def lowered(layout: Layout, mesh: Mesh = MESH, micro_batch_size: int = 6) -> Program:
    segments = [SegmentPlan(stage=0, first_block=0, last_block=2)]
    return lower(MODEL, layout, mesh=mesh, micro_batch_size=micro_batch_size, segments=segments)


def changed(kind: str, node: str, typing: NodeTyping) -> Layout:
    """The replicated layout with another typing of one node."""
    layout = replicated(MODEL)
    return {**layout, kind: {**layout[kind], node: typing}}


def test_the_replicated_layout_is_fine():
    assert lowered(replicated(MODEL)).kinds.keys() == MODEL.kinds.keys()


def test_an_ill_typed_op_is_named_with_its_source():
    wrong = NodeTyping(operands=(placed("I R"), placed("I R")), results=(placed("I I"),))
    with pytest.raises(PlacementError, match=r"embedding.*is typed R, R -> I on axis tp") as caught:
        lowered(changed("embed", "embedding_default", wrong))
    assert caught.value.where == "model.py:3, in forward"


def test_a_dim_that_does_not_divide_is_refused():
    with pytest.raises(PlacementError, match="12 does not divide"):
        lowered(
            changed("embed", "ids", NodeTyping(operands=(), results=(placed("I S(1)"),))),
            mesh=Mesh(tp=5),
        )


def test_a_missing_kind_is_refused():
    layout = replicated(MODEL)
    with pytest.raises(PlacementError, match="no kind of block head"):
        lowered({name: layout[name] for name in ("embed", "body")})


def test_a_missing_node_is_refused():
    layout = replicated(MODEL)
    kind: KindLayout = {k: v for k, v in layout["head"].items() if k != "linear_default"}
    with pytest.raises(PlacementError, match=r"linear_default .* has no typing"):
        lowered({**layout, "head": kind})


@pytest.mark.parametrize("mesh", [MESH, Mesh()])
def test_a_placement_with_too_few_axes_is_refused(mesh: Mesh):
    typing = NodeTyping(operands=(), results=((INVARIANT,),))
    with pytest.raises(PlacementError, match="there are 4 axes"):
        lowered(changed("embed", "ids", typing), mesh=mesh)


def test_blocks_that_disagree_on_a_value_are_refused():
    with pytest.raises(PlacementError, match=r"is taken as \(dp I, tp S\(1\)\)"):
        lowered(changed("body", "x", NodeTyping(operands=(), results=(placed("I S(1)"),))))


def test_blocks_that_disagree_on_a_tied_parameter_are_refused():
    with pytest.raises(PlacementError, match=r"parameter:embed is placed \(dp I, tp I\)"):
        lowered(changed("head", "weight", NodeTyping(operands=(), results=(placed("I S(0)"),))))


def test_a_replicated_loss_is_refused():
    typing = NodeTyping(operands=(placed("I R"), placed("I I")), results=())
    with pytest.raises(PlacementError, match="the loss is R on axis tp"):
        lowered(changed("head", "output", typing))


def test_an_axis_of_one_rank_forgives_any_state():
    typing = NodeTyping(operands=(placed("I R"), placed("I I")), results=())
    assert lowered(changed("head", "output", typing), mesh=Mesh(dp_shard=2)).segments


def test_an_empty_micro_batch_is_refused():
    with pytest.raises(InputError, match="micro_batch_size"):
        lowered(replicated(MODEL), micro_batch_size=0)


def test_a_pass_that_breaks_the_typing_is_caught():
    def unmoved(typed: TypedKind) -> TypedKind:
        broken = NodeTyping(operands=(placed("I P"),), results=(placed("I P"),))
        return TypedKind(kind=typed.kind, layout={**typed.layout, "tanh_default": broken})

    typed = tanh_kind()
    with pytest.raises(PlacementError, match="tanh_default"):
        run_passes(typed, [unmoved], degrees=MESH.degrees(), batch=12)


def tanh_kind() -> TypedKind:
    builder = KindBuilder()
    x = builder.placeholder("x", (BATCH, 12), role=Role.ACTIVATION)
    kind = builder.build("kind", [builder.call(aten.tanh.default, x)])
    whole = placed("I I")
    layout = {
        "x": NodeTyping(operands=(), results=(whole,)),
        "tanh_default": NodeTyping(operands=(whole,), results=(whole,)),
        "output": NodeTyping(operands=(whole,), results=()),
    }
    return TypedKind(kind=kind, layout=layout)
