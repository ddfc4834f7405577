"""Causal attention of the positions that a rank holds."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autopar.ir.causal import causal_attention, position_runs
from autopar.ir.moves import assemble
from autopar.ir.placement import parse_state
from autopar.runtime.threads import thread_groups

HEADS, KEY_HEADS, POSITIONS = 4, 2, 24


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> Tensor:
        return torch.randn(
            2, heads, POSITIONS, 8, generator=generator, dtype=torch.float64, requires_grad=True
        )

    return draw(HEADS), draw(KEY_HEADS), draw(KEY_HEADS)


@pytest.mark.parametrize(
    ("states", "sizes"),
    [
        (["S(2)"], [3]),
        (["S(2, 1:1)"], [2]),
        (["S(2, 1:1:1:1)"], [2]),
        (["S(2, 1:1)", "S(2)"], [2, 3]),
    ],
    ids=str,
)
def test_the_ranks_together_compute_the_whole_attention(states: list[str], sizes: list[int]):
    query, key, value = tensors()
    whole = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3, enable_gqa=True
    )
    seed = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, (query, key, value), seed)
    axes = [thread_groups("cp", size) for size in sizes]
    parts: list[Tensor] = []
    for groups in itertools.product(*axes):
        shards = list(zip(groups, states, strict=True))
        held = [p for start, n in position_runs(POSITIONS, shards) for p in range(start, start + n)]
        part = causal_attention(
            query[:, :, held],
            key,
            value,
            num_positions=POSITIONS,
            shards=shards,
            scale=0.3,
            enable_gqa=True,
        )
        torch.testing.assert_close(part, whole[:, :, held])
        parts.append(part)
    for state, size in reversed(list(zip(states, sizes, strict=True))):
        runs = range(0, len(parts), size)
        parts = [assemble(parts[first : first + size], parse_state(state)) for first in runs]
    found = torch.autograd.grad(parts[0], (query, key, value), seed)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_stripes_share_the_scores_evenly():
    """Without stripes the last of 4 ranks has 7/4 of its share, with 4 of them 19/16."""

    def scores(state: str) -> list[int]:
        return [
            sum(
                p + 1
                for start, n in position_runs(64, [(group, state)])
                for p in range(start, start + n)
            )
            for group in thread_groups("cp", 4)
        ]

    total = 64 * 65 // 2
    assert scores("S(2)") == [136, 392, 648, 904]
    striped = scores("S(2, 1:1:1:1)")
    assert sum(striped) == total
    assert max(striped) < 1.2 * total / 4
