"""Functions of graphs at their edges: queries that see no key, ids that no rank has."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.ir.functional import vocab_embedding, vocab_token_loss
from autopar.ir.random_ops import attention_with_dropout
from autopar.ir.randomness import Drawing, drawing
from autopar.runtime.threads import run_ranks, thread_groups


@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_a_query_that_sees_no_key_gets_zeros(kind: torch.dtype) -> None:
    """As the fused kernels have it; the first two positions of the second sequence are padding."""
    visible = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
    visible[1, :, :, :2] = False
    mask = visible
    if kind is not torch.bool:
        mask = torch.zeros(visible.shape, dtype=kind).masked_fill(~visible, -torch.inf)
    query, key, value = torch.randn(3, 2, 3, 4, 8, dtype=torch.float64)
    inputs = tuple(tensor.requires_grad_() for tensor in (query, key, value))

    def gradients(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out.square().sum(), inputs)

    with drawing(Drawing(seed=0, step=0, sequences=(0, 1))):
        found = attention_with_dropout(
            query,
            key,
            value,
            0.0,
            attn_mask=mask,
            op="attention",
            shape=(1, 3, 4, 4),
            batch_dim=0,
            shards=(),
        )
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(found, expected)
    assert not found[1, :, :2].any()
    for gradient, right in zip(gradients(found), gradients(expected), strict=True):
        torch.testing.assert_close(gradient, right)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_large_vocabulary_overflows_no_narrow_type(dtype: torch.dtype) -> None:
    """The sum of 2^17 exponentials of 0 is beyond fp16; its logarithm is not."""
    groups, targets = thread_groups("tp", 2), torch.tensor([5, 2**16 + 1])

    def loss(rank: int) -> tuple[Tensor, Tensor]:
        logits = torch.zeros(2, 2**16, dtype=dtype, requires_grad=True)
        total, _ = vocab_token_loss(logits, targets, groups[rank], vocabulary=2**17)
        total.backward()
        assert logits.grad is not None
        return total.detach(), logits.grad

    for rank, (total, gradient) in enumerate(run_ranks(2, loss, meetings=[groups[0].meeting])):
        assert total.dtype == torch.float32
        assert total.item() == pytest.approx(2 * 17 * math.log(2), rel=1e-3)
        assert gradient.dtype == dtype
        row, target = rank, int(targets[rank]) - rank * 2**16
        assert gradient[row, target].item() == pytest.approx(-1, rel=1e-2)


@pytest.mark.parametrize("wrong", [-1, 8])
def test_an_id_that_no_rank_has_is_an_error(wrong: int) -> None:
    groups = thread_groups("tp", 2)
    ids, weight = torch.tensor([0, wrong]), torch.randn(4, 3)

    def embed(rank: int) -> Tensor:
        return vocab_embedding(weight, ids, groups[rank], vocabulary=8)

    def loss(rank: int) -> Tensor:
        return vocab_token_loss(torch.randn(2, 4), ids, groups[rank], vocabulary=8)[0]

    for function in (embed, loss):
        with pytest.raises(RuntimeError, match="not below 8"):
            run_ranks(2, function, meetings=[groups[0].meeting])
