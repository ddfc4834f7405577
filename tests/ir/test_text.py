"""Rules written as texts: what they mean, and errors that say what is wrong."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.errors import InputError
from autopar.ir.graph import BATCH, Size, TensorInfo
from autopar.ir.rules.core import Dim, Rule
from autopar.ir.rules.text import parse_rule


def tensor(*shape: Size) -> TensorInfo:
    return TensorInfo(shape=shape, dtype=torch.float32, requires_grad=True)


def rule(text: str, operands: list[TensorInfo], results: list[TensorInfo]) -> Rule:
    return parse_rule(text, operands, results)


def test_a_linear_layer_is_written_like_einsum() -> None:
    parsed = rule("b.. k, n k -> b.. n", [tensor(BATCH, 4, 8), tensor(6, 8)], [tensor(BATCH, 4, 6)])
    batch, seq, k, n = Dim(("b..1",)), Dim(("b..0",)), Dim(("k",)), Dim(("n",))
    assert parsed.operands == ((batch, seq, k), (n, k))
    assert parsed.results == ((batch, seq, n),)
    assert parsed.sizes == {"b..1": BATCH, "b..0": 4, "k": 8, "n": 6}


def test_broadcast_dims_carry_no_factor() -> None:
    parsed = rule("d.., d.. -> d..", [tensor(4, 1), tensor(6)], [tensor(4, 6)])
    assert parsed.operands == ((Dim(("d..1",)), Dim()), (Dim(("d..0",)),))


def test_products_are_solved_for_one_unknown_factor() -> None:
    parsed = rule("b (h d) -> b h d", [tensor(BATCH, 12)], [tensor(BATCH, 4, 3)])
    assert parsed.sizes["h"] == 4
    parsed = rule("(m g), m -> (m g)", [tensor(12), tensor(3)], [tensor(12)])
    assert parsed.sizes == {"m": 3, "g": 4}


def test_marked_factors_are_not_split() -> None:
    parsed = rule("b.. !k -> b.. k", [tensor(4, 6)], [tensor(4, 6)])
    assert parsed.split_factors() == ("b..0",)
    assert rule("!b.. -> b..", [tensor(4, 6)], [tensor(4, 6)]).split_factors() == ()


def test_whole_dims_have_any_size() -> None:
    parsed = rule("b _ -> b _", [tensor(4, 6)], [tensor(4, 5)])
    assert parsed.results == ((Dim(("b",)), Dim()),)


@pytest.mark.parametrize(
    ("text", "operands", "message"),
    [
        ("b k", [tensor(4, 6)], "no '->'"),
        ("b k, k -> b", [tensor(4, 6)], "has 2 operands, the op has 1"),
        ("b -> b", [tensor(4, 6)], "2 dims does not fit"),
        ("b* k -> b", [tensor(4, 6)], "cannot read 'b\\*'"),
        ("(b k -> b", [tensor(4, 6)], "cannot read|unbalanced"),
        ("b.. k.. -> b", [tensor(4, 6)], "more than one '..'"),
        ("b b -> b", [tensor(4, 6)], "factor 'b' has the sizes 4 and 6"),
        ("b (h d) -> b", [tensor(4, 6)], "cannot be told from their product"),
        ("b (b d) -> b", [tensor(4, 6)], "no multiple of 4"),
    ],
)
def test_errors_say_what_is_wrong(text: str, operands: list[TensorInfo], message: str) -> None:
    with pytest.raises(InputError, match=message):
        rule(text, operands, [tensor(4)])
