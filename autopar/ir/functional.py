"""Functions that graphs call beside ATen ops: the loss, and forms of ops that a split changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from autopar.ir.axis_group import AxisGroup
from autopar.ir.losses import require_below, sum_dtype, token_loss, vocab_token_loss

__all__ = ["partial_mean", "sum_dtype", "token_loss", "vocab_embedding", "vocab_token_loss"]


def vocab_embedding(
    weight: Tensor, ids: Tensor, axis: AxisGroup, padding_idx: int = -1, *, vocabulary: int
) -> Tensor:
    """Embedding with the rows of ``weight`` sharded over ``axis``: the result is ``P``.

    One rank knows each row of the ``vocabulary``; shards may be padded.

    The row ``padding_idx``, if it is not negative, gets no gradient.
    """
    rows = weight.shape[0]
    require_below(ids, vocabulary)
    local = ids - axis.rank * rows
    foreign = (local < 0) | (local >= rows)
    padding = padding_idx - axis.rank * rows
    found = functional.embedding(
        local.masked_fill(foreign, 0),
        weight,
        padding_idx=padding if padding_idx >= 0 and 0 <= padding < rows else None,
    )
    return found.masked_fill(foreign.unsqueeze(-1), 0)


def partial_mean(
    tensor: Tensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    axes: Sequence[AxisGroup],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's term of the mean of a tensor whose reduced dims are sharded over ``axes``."""
    mean = tensor.mean(None if dim is None else tuple(dim), keepdim, dtype=dtype)
    return mean / math.prod(axis.size for axis in axes)
