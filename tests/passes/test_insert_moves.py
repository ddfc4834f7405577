"""Moves are inserted where placements differ, once for all readers that demand the same."""

from __future__ import annotations

from autopar.ir.graph import BATCH, Role, info
from autopar.ir.layout import NodeTyping
from autopar.ir.mesh import Mesh
from autopar.ir.moves import move
from autopar.passes.base import TypedKind
from autopar.passes.insert_moves import InsertMoves
from autopar.passes.remove_dead_code import RemoveDeadCode
from tests.passes.harness import placed
from tests.passes.random_models import HIDDEN, SEQ, aten
from tests.strategies import KindBuilder

MESH = Mesh(dp_shard=2, tp=2)


def op(operands: list[str], result: str) -> NodeTyping:
    return NodeTyping(operands=tuple(map(placed, operands)), results=(placed(result),))


def two_readers(first: str, second: str, *, given: str, grad: bool = True) -> TypedKind:
    """``neg(x)`` and ``tanh(x)``, which demand ``x`` as ``first`` and ``second``."""
    builder = KindBuilder()
    x = builder.placeholder("x", (BATCH, SEQ, HIDDEN), role=Role.ACTIVATION, requires_grad=grad)
    neg, tanh = builder.call(aten.neg.default, x), builder.call(aten.tanh.default, x)
    kind = builder.build("kind", [neg, tanh])
    layout = {
        x.name: op([], given),
        neg.name: op([first], first),
        tanh.name: op([second], second),
        "output": NodeTyping(operands=(placed(first), placed(second)), results=()),
    }
    return TypedKind(kind=kind, layout=layout)


def moves_of(typed: TypedKind) -> list[tuple[str, str, str]]:
    return [
        (str(node.args[1]), str(node.args[2]), str(node.args[3]))
        for node in typed.kind.graph.nodes
        if node.target is move
    ]


def test_readers_that_demand_the_same_share_a_move():
    typed = InsertMoves(mesh=MESH)(two_readers("S(0) R", "S(0) R", given="S(0) I"))
    assert moves_of(typed) == [("axis_tp", "I", "R")]
    (moved,) = (node for node in typed.kind.graph.nodes if node.target is move)
    assert {user.name for user in moved.users} == {"neg_default", "tanh_default"}


def test_readers_that_demand_different_placements_have_moves_of_their_own():
    typed = InsertMoves(mesh=MESH)(two_readers("S(0) R", "S(0) S(2)", given="S(0) I"))
    assert moves_of(typed) == [("axis_tp", "I", "R"), ("axis_tp", "I", "S(2)")]


def test_a_dim_sharded_by_two_axes_is_released_from_the_inside():
    typed = InsertMoves(mesh=MESH)(two_readers("R R", "R R", given="S(0) S(0)"))
    assert moves_of(typed) == [("axis_tp", "S(0)", "R"), ("axis_dp", "S(0)", "R")]


def test_a_dim_is_sharded_by_two_axes_from_the_outside():
    typed = InsertMoves(mesh=MESH)(two_readers("S(0) S(0)", "S(0) S(0)", given="R R"))
    assert moves_of(typed) == [("axis_dp", "R", "S(0)"), ("axis_tp", "R", "S(0)")]


def test_a_met_demand_changes_nothing():
    typed = two_readers("S(0) R", "S(0) R", given="S(0) R")
    assert InsertMoves(mesh=MESH)(typed) is typed


def test_without_gradient_invariant_is_replicated():
    typed = two_readers("S(0) R", "S(0) I", given="S(0) I", grad=False)
    assert InsertMoves(mesh=MESH)(typed) is typed


def test_the_given_kind_is_left_alone():
    typed = two_readers("S(0) R", "S(0) R", given="S(0) I")
    before = str(typed.kind.graph)
    InsertMoves(mesh=MESH)(typed)
    assert str(typed.kind.graph) == before


def test_moves_know_where_they_come_from():
    typed = two_readers("S(0) R", "S(0) R", given="S(0) I")
    moved = InsertMoves(mesh=MESH)(typed)
    node = next(node for node in moved.kind.graph.nodes if node.target is move)
    assert node.name == "x_tp_r"
    assert info(node).tensor == info(next(iter(moved.kind.graph.nodes))).tensor
    assert moved.layout[node.name] == op(["S(0) I"], "S(0) R")


def test_outputs_are_moved_to_what_the_boundary_demands():
    typed = two_readers("S(0) P", "S(0) I", given="S(0) I")
    layout = {**typed.layout}
    layout["output"] = NodeTyping(operands=(placed("S(0) S(1)"), placed("S(0) I")), results=())
    moved = InsertMoves(mesh=MESH)(TypedKind(kind=typed.kind, layout=layout))
    assert moves_of(moved) == [("axis_tp", "I", "P"), ("axis_tp", "P", "S(1)")]


def test_dead_code_is_removed_with_its_typing():
    builder = KindBuilder()
    x = builder.placeholder("x", (BATCH, SEQ, HIDDEN), role=Role.ACTIVATION)
    dead = builder.call(aten.tanh.default, builder.call(aten.neg.default, x))
    kind = builder.build("kind", [x])
    layout = {
        node.name: op(["R R"], "R R") if node.op == "call_function" else op([], "R R")
        for node in kind.graph.nodes
    }
    typed = RemoveDeadCode()(TypedKind(kind=kind, layout=layout))
    assert [node.op for node in typed.kind.graph.nodes] == ["placeholder", "output"]
    assert dead.name not in typed.layout
    assert RemoveDeadCode()(typed) is typed
