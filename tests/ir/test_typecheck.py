"""Layouts are well-typed, or rejected with op, source line, axis and what would be valid."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._ops import OpOverload

from autopar.ir import functional
from autopar.ir.errors import PlacementError
from autopar.ir.graph import (
    BATCH,
    Block,
    BlockKind,
    LossKind,
    ModelGraph,
    Role,
    Size,
    ValueId,
    activation,
)
from autopar.ir.layout import NodeTyping
from autopar.ir.rules.registry import has_rule
from autopar.ir.typecheck import check_kind, check_model, chosen_options, kind_options
from tests.passes.harness import placed
from tests.strategies import KindBuilder, degrees, kinds, random_layout

_aten = torch.ops.aten
DEGREES = {"dp": 2, "cp": 1, "ep": 1, "tp": 2}


def typed(operands: list[str], results: list[str]) -> NodeTyping:
    return NodeTyping(operands=tuple(map(placed, operands)), results=tuple(map(placed, results)))


def check(kind: BlockKind, layout: Mapping[str, NodeTyping]) -> None:
    check_kind(kind, layout, degrees=DEGREES, batch=4)


def residual() -> BlockKind:
    """``x + linear(x)``, an activation ``[b, 4, 8]`` in and out."""
    build = KindBuilder()
    weight = build.placeholder("weight", (8, 8))
    x = build.placeholder("x", (BATCH, 4, 8), role=Role.ACTIVATION)
    product = build.call(_aten.linear.default, x, weight)
    return build.build("residual", [build.call(_aten.add.Tensor, x, product)])


RESIDUAL = {
    "weight": typed([], ["R S(1)"]),
    "x": typed([], ["S(0) I"]),
    "linear_default": typed(["S(0) S(2)", "R S(1)"], ["S(0) P"]),
    "add_tensor": typed(["S(0) I", "S(0) I"], ["S(0) I"]),
    "output": typed(["S(0) I"], []),
}


@given(st.data())
def test_random_well_typed_layouts_pass(data: st.DataObject) -> None:
    kind = data.draw(kinds())
    axes = data.draw(degrees())
    layout = random_layout(kind, data.draw, degrees=axes, batch=4)
    check_kind(kind, layout, degrees=axes, batch=4)


@given(st.data())
def test_a_changed_result_state_passes_only_if_another_option_has_it(data: st.DataObject) -> None:
    kind = data.draw(kinds())
    layout = dict(random_layout(kind, data.draw, degrees=DEGREES, batch=4))
    calls = [
        node.name for node in kind.graph.nodes if _is_call(node) and layout[node.name].operands
    ]
    name = data.draw(st.sampled_from(calls))
    typing = layout[name]
    changed = placed(data.draw(st.sampled_from(["I I", "R P", "P R", "S(0) P", "P S(1)"])))
    layout[name] = NodeTyping(operands=typing.operands, results=(changed, *typing.results[1:]))
    try:
        options = chosen_options(kind, layout, degrees=DEGREES, batch=4)
    except PlacementError:
        return
    found = tuple(option.results[0] for option in options[name].values())
    assert found == changed


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_function" and has_rule(node)


def test_megatron_row_parallel_passes() -> None:
    check(residual(), RESIDUAL)


@pytest.mark.parametrize(
    ("name", "typing", "message"),
    [
        ("add_tensor", typed(["S(0) R", "S(0) P"], ["S(0) P"]), r"R, P -> P on axis tp"),
        ("add_tensor", typed(["S(0) I", "S(0) R"], ["S(0) I"]), r"I, R -> I on axis tp"),
        ("linear_default", typed(["S(0) P", "R P"], ["S(0) P"]), r"P, P -> P on axis tp"),
        ("linear_default", typed(["S(0) S(2)", "R S(1)"], ["S(0) I"]), r"S\(2\), S\(1\) -> I"),
        ("linear_default", typed(["S(0) I", "I I"], ["S(0) I"]), r"S\(0\), I -> S\(0\) on axis dp"),
        ("x", typed([], ["S(0) S(3)"]), "it has 3 dims"),
        ("x", typed([], ["S(1) S(1,1:1)"]), "blocks of a dim that an outer axis shards"),
        ("x", typed([], ["S(2) S(2,3:1)"]), "blocks of a dim"),
        ("weight", typed([], ["R P"]), "a parameter is no sum over ranks"),
        ("output", typed([], []), "1 operands, but 0 placements"),
    ],
)
def test_ill_typed_nodes_are_rejected(name: str, typing: NodeTyping, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        check(residual(), {**RESIDUAL, name: typing})


def test_errors_name_op_source_and_options() -> None:
    wrong = {**RESIDUAL, "add_tensor": typed(["S(0) R", "S(0) P"], ["S(0) P"])}
    with pytest.raises(PlacementError) as caught:
        check(residual(), wrong)
    text = str(caught.value)
    assert "add_tensor (aten.add.Tensor)" in text
    assert "model.py:4, in forward" in text
    assert "P, P -> P" in text
    assert "S(2), S(2) -> S(2)" in text


def test_missing_typings_are_named() -> None:
    layout = {name: typing for name, typing in RESIDUAL.items() if name != "linear_default"}
    with pytest.raises(PlacementError, match=r"linear_default .* has no typing"):
        check(residual(), layout)


def test_axes_that_share_a_dim_divide_it_together() -> None:
    layout = {
        **RESIDUAL,
        "x": typed([], ["S(1) S(1)"]),
        "add_tensor": typed(["S(1) S(1)", "S(1) S(1)"], ["S(1) S(1)"]),
    }
    check(residual(), layout)
    with pytest.raises(PlacementError, match="does not divide"):
        check_kind(residual(), layout, degrees={**DEGREES, "dp": 4}, batch=4)


def loss_kind() -> BlockKind:
    build = KindBuilder()
    logits = build.placeholder("logits", (BATCH, 4, 8), role=Role.ACTIVATION)
    targets = build.placeholder("targets", (BATCH, 4), role=Role.INPUT, dtype=torch.int64)
    loss = build.call(functional.token_loss, logits, targets)
    return build.build("loss", [build.item(loss, 0), build.item(loss, 1)])


LOSS = {
    "logits": typed([], ["S(0) S(2)"]),
    "targets": typed([], ["S(0) R"]),
    "token_loss": typed(["S(0) S(2)", "S(0) R"], ["P I", "P I"]),
    "getitem": typed([], ["P I"]),
    "getitem_1": typed([], ["P R"]),  # the weight has no gradient: I and R are the same
    "output": typed(["P I", "P I"], []),
}


def test_vocabulary_parallel_loss_passes() -> None:
    check(loss_kind(), LOSS)


def test_elements_have_the_placement_of_what_they_are_read_from() -> None:
    with pytest.raises(PlacementError, match=r"getitem .* is \(dp P, tp P\), but the element"):
        check(loss_kind(), {**LOSS, "getitem": typed([], ["P P"])})


def test_two_axes_cannot_share_a_helper() -> None:
    layout = {
        **LOSS,
        "logits": typed([], ["S(2) S(2)"]),
        "targets": typed([], ["R R"]),
        "token_loss": typed(["S(2) S(2)", "R R"], ["I I", "I I"]),
        "getitem": typed([], ["I I"]),
        "getitem_1": typed([], ["I I"]),
    }
    with pytest.raises(PlacementError, match="helpers on several axes"):
        check(loss_kind(), layout)


def random_options(target: OpOverload, shape: tuple[Size, ...], *args: object) -> set[str]:
    build = KindBuilder()
    x = build.placeholder("x", shape, role=Role.ACTIVATION)
    node = build.call(target, x, *args)
    kind = build.build("random", [node])
    return {
        str(option) for option in kind_options(kind, axis="dp", axis_size=2, batch=4)[node.name]
    }


def test_random_ops_are_typed_as_others_are() -> None:
    """Numbers are drawn by logical position, whatever part of them a rank takes."""
    either = {"I -> I", "R -> R", "S(0) -> S(0)", "S(1) -> S(1)"}
    assert random_options(_aten.bernoulli.default, (BATCH, 4)) == either
    assert random_options(_aten.dropout.default, (BATCH, 4), 0.1, True) == {*either, "P -> P"}


@pytest.mark.parametrize("shape", [(BATCH, BATCH), (2, BATCH, 2 * BATCH)], ids=str)
def test_random_numbers_without_a_logical_position_are_refused(shape: tuple[Size, ...]) -> None:
    with pytest.raises(PlacementError, match="draws random numbers on which ranks cannot agree"):
        random_options(_aten.bernoulli.default, shape)


def model(
    loss_typing: NodeTyping | None = None,
) -> tuple[ModelGraph, dict[str, dict[str, NodeTyping]]]:
    """Two residual blocks and a loss."""
    loss = loss_kind()
    blocks: tuple[Block, ...] = (
        _block(0, "residual", (ValueId(Role.PARAMETER, "w0"), ValueId(Role.ACTIVATION, "3:0"))),
        _block(1, "residual", (ValueId(Role.PARAMETER, "w1"), activation(0, 0))),
        _block(2, "loss", (activation(1, 0), ValueId(Role.INPUT, "targets"))),
    )
    # the first block reads what a block before it would give: a source of its own
    source = KindBuilder()
    made = source.placeholder("made", (BATCH, 4, 8), role=Role.INPUT, dtype=torch.float64)
    first = source.build("source", [source.call(_aten.neg.default, made)])
    blocks = (*blocks, _block(3, "source", (ValueId(Role.INPUT, "made"),)))
    graph = ModelGraph(
        name="model",
        blocks=blocks,
        kinds={"residual": residual(), "loss": loss, "source": first},
        parameters={},
        inputs={},
        constants={},
        loss=activation(2, 0),
        weight=activation(2, 1),
        loss_kind=LossKind.TOKEN_SUM,
        compute_dtype=torch.float64,
        fingerprint="",
    )
    own = {
        **LOSS,
        "logits": typed([], ["S(0) I"]),
        "output": loss_typing or LOSS["output"],
    }
    start = {
        "made": typed([], ["S(0) R"]),
        "neg_default": typed(["S(0) R"], ["S(0) R"]),
        "output": typed(["S(0) I"], []),
    }
    return graph, {"residual": dict(RESIDUAL), "loss": own, "source": start}


def _block(index: int, kind: str, bindings: tuple[ValueId, ...]) -> Block:
    return Block(index=index, kind=kind, path=f"layers.{index}", bindings=bindings)


def test_a_model_whose_blocks_agree_passes() -> None:
    graph, layout = model()
    check_model(graph, layout, degrees=DEGREES, batch=4)


def test_blocks_agree_at_their_boundary() -> None:
    graph, layout = model()
    layout["loss"]["logits"] = typed([], ["S(0) S(2)"])
    with pytest.raises(
        PlacementError, match=r"dp S\(0\), tp S\(2\).* layers.2.* layers.1 gives .*dp S\(0\), tp I"
    ):
        check_model(graph, layout, degrees=DEGREES, batch=4)


def test_the_loss_is_never_replicated() -> None:
    graph, layout = model(typed(["P R", "P R"], []))
    with pytest.raises(PlacementError, match="the loss is R on axis tp"):
        check_model(graph, layout, degrees=DEGREES, batch=4)
    check_model(graph, layout, degrees={**DEGREES, "tp": 1}, batch=4)
