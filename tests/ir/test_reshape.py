"""Reshapes are described by the factors that both shapes share."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from autopar.ir.graph import BATCH, Size, evaluate
from autopar.ir.rules.core import Dim
from autopar.ir.rules.reshape import CommonFactors, common_factors


def names(factors: CommonFactors) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    return [dim.factors for dim in factors.source], [dim.factors for dim in factors.target]


def test_heads_are_split_and_merged() -> None:
    found = common_factors([BATCH, 16, 64], [BATCH, 16, 4, 16])
    assert names(found) == (
        [("f0",), ("f1",), ("f2", "f3")],
        [("f0",), ("f1",), ("f2",), ("f3",)],
    )
    assert found.sizes == {"f0": BATCH, "f1": 16, "f2": 4, "f3": 16}
    assert not found.private


def test_the_batch_is_merged_with_the_sequence() -> None:
    found = common_factors([BATCH, 16, 64], [16 * BATCH, 64])
    assert names(found) == ([("f0",), ("f1",), ("f2",)], [("f0", "f1"), ("f2",)])


def test_repeated_key_heads_keep_their_groups() -> None:
    found = common_factors([BATCH, 2, 3, 16, 8], [BATCH, 6, 16, 8])
    assert names(found)[1][1] == ("f1", "f2")


def test_what_has_no_common_divisor_stays_whole() -> None:
    found = common_factors([6, 4, 5], [4, 6, 5])
    assert names(found) == ([("f0", "f1"), ("f2",), ("f5",)], [("f0", "f3"), ("f4",), ("f5",)])
    assert found.private == {"f1", "f2", "f3", "f4"}


def test_dims_of_size_one_have_no_factors() -> None:
    found = common_factors([1, 4, 1], [4, 1, 1, 1])
    assert found.source == (Dim(), Dim(("f0",)), Dim())


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[Size], list[Size]]:
    numbers: list[int] = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6]), max_size=5))
    atoms: list[Size] = [*numbers]
    if draw(st.booleans()):
        atoms.insert(draw(st.integers(0, len(atoms))), BATCH)
    shapes: list[list[Size]] = []
    for _ in range(2):
        shape: list[Size] = []
        for atom in atoms:
            merged: bool = draw(st.booleans())
            if shape and merged:
                shape[-1] = shape[-1] * atom
            else:
                shape.append(atom)
        shapes.append(shape)
    return shapes[0], shapes[1]


@given(reshapes())
@example(([6, 4], [4, 6]))
def test_factors_multiply_to_the_dims_and_keep_the_order_of_entries(
    case: tuple[list[Size], list[Size]],
) -> None:
    source, target = case
    found = common_factors(source, target)
    for shape, dims in ((source, found.source), (target, found.target)):
        assert len(shape) == len(dims)
        for size, dim in zip(shape, dims, strict=True):
            product = math.prod(evaluate(found.sizes[factor], 7) for factor in dim.factors)
            assert product == evaluate(size, 7)
    sides = [
        [factor for dim in dims for factor in dim.factors if factor not in found.private]
        for dims in (found.source, found.target)
    ]
    assert sides[0] == sides[1]
