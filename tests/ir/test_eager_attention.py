"""Eager attention is PyTorch's, whatever the mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.ir.causal import causal_attention
from autopar.ir.eager_attention import eager_attention

QUERIES, KEYS = 4, 6


def mask_of(kind: str) -> Tensor | None:
    seen = torch.rand(2, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) < 0.5
    if kind == "blind rows":
        seen[:, :, 1] = False
    if kind in ("seen", "blind rows"):
        return seen
    if kind == "added":
        return torch.randn(2, 4, QUERIES, KEYS, generator=torch.Generator().manual_seed(2))
    return None


@pytest.mark.parametrize("kind", ["none", "seen", "blind rows", "added", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("key_heads", "scale"), [(4, None), (2, 0.3)])
def test_eager_attention_is_that_of_the_math_backend(
    kind: str, dtype: torch.dtype, key_heads: int, scale: float | None
) -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(2, heads, length, 8, dtype=dtype, requires_grad=True)
        for heads, length in ((4, QUERIES), (key_heads, KEYS), (key_heads, KEYS))
    ]
    query, key, value = tensors
    mask = mask_of(kind)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    grouped = key_heads != 4
    found = eager_attention(
        query, key, value, mask, is_causal=kind == "causal", scale=scale, enable_gqa=grouped
    )
    with sdpa_kernel(SDPBackend.MATH):
        expected = functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=kind == "causal", scale=scale, enable_gqa=grouped
        )
    assert torch.equal(found, expected)
    assert found.isfinite().all()
    weights = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((r * weights).sum(), tensors) for r in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def test_eager_causal_attention_of_some_positions_is_that_of_all() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 8, 16, dtype=torch.float64)
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    found = causal_attention(query, key, value, num_positions=8, shards=(), eager=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class _Axis:
    """The second of two ranks."""

    name, rank, size = "cp", 1, 2


def test_eager_causal_attention_of_a_rank() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 8, 16, dtype=torch.float64)
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    found = causal_attention(
        query[..., 4:, :],
        key,
        value,
        num_positions=8,
        shards=((_Axis(), "S(2)"),),  # type: ignore[arg-type]
        eager=True,
    )
    torch.testing.assert_close(found, expected[..., 4:, :], rtol=1e-12, atol=1e-12)
