"""Numbers as people read them."""

from __future__ import annotations

import pytest

from autopar.ir.units import counted


@pytest.mark.parametrize(
    ("num", "things", "text"),
    [
        (1, "candidates", "1 candidate"),
        (2, "candidates", "2 candidates"),
        (1, "micro-batches", "1 micro-batch"),
        (1200, "micro-batches", "1,200 micro-batches"),
    ],
)
def test_things_are_counted(num: int, things: str, text: str) -> None:
    assert counted(num, things) == text
