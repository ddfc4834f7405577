"""Ops that draw random numbers, in the form that ranks run: numbers by logical position.

``position`` arguments are those of ``randomness.draw``: ``op``, ``shape``, ``batch_dim``,
``shards``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.ir.moves import take_shard
from autopar.ir.placement import parse_state, sharded
from autopar.ir.randomness import draw


def dropout(tensor: Tensor, p: float, **position: Any) -> Tensor:
    """``tensor`` with each element zeroed with probability ``p``, the others scaled up."""
    return _drop(tensor, _kept(p, tensor, position), p)


def feature_dropout(tensor: Tensor, p: float, **position: Any) -> Tensor:
    """``dropout`` of whole channels: one number for each index of the first two dims."""
    return _drop(tensor, _kept_channels(p, tensor, position), p)


def alpha_dropout(tensor: Tensor, p: float, *, channels: bool, **position: Any) -> Tensor:
    """Dropout that keeps mean and variance of what SELU gives, of elements or whole channels."""
    keep = (_kept_channels if channels else _kept)(p, tensor, position)
    if p == 1:
        return tensor * 0
    scale = ((1 - p) * (1 + p * _SELU_LOWEST**2)) ** -0.5
    return scale * tensor.where(keep, _SELU_LOWEST) - scale * _SELU_LOWEST * p


_SELU_LOWEST = -1.7580993408473766
"""−λα of SELU, what it tends to for very negative inputs."""


def rrelu(tensor: Tensor, lower: float, upper: float, **position: Any) -> Tensor:
    """Leaky ReLU with a random slope for every negative element."""
    slopes = sampled(tensor, "uniform", (lower, upper), tensor.dtype, **position)
    return torch.where(tensor < 0, tensor * slopes, tensor)


def bernoulli(tensor: Tensor, p: float | None, **position: Any) -> Tensor:
    """1 with probability ``tensor`` (or ``p``), else 0; in the type of ``tensor``."""
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    uniform = sampled(tensor, "uniform", (0.0, 1.0), wide, **position)
    return (uniform < (tensor if p is None else p)).to(tensor.dtype)


def sampled(
    like: Tensor, law: str, parameters: Sequence[float], dtype: torch.dtype, **position: Any
) -> Tensor:
    """Numbers of a ``law`` (``uniform``, ``normal``, ``random``, ``exponential``), shaped as
    ``like``.
    """

    def sample(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        empty = torch.empty(shape, dtype=dtype, device=generator.device)
        found: Tensor = getattr(empty, f"{law}_")(*parameters, generator=generator)
        return found

    return _drawn(sample, like.shape, dtype, like.device, position)


def made(
    law: str,
    parameters: Sequence[float],
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    **position: Any,
) -> Tensor:
    """``sampled`` of local shape ``size``, where no tensor says on which device."""
    place = torch.empty(0).device if device is None else torch.device(device)
    return sampled(torch.empty((), device=place).expand(size), law, parameters, dtype, **position)


def attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **position: Any,
) -> Tensor:
    """``scaled_dot_product_attention`` whose weights go through ``dropout``; not fused, because a
    fused kernel draws as its own blocking has it.

    ``position`` is that of the weights ``[…, heads, queries, keys]``: batch, heads and query
    positions may be sharded.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(groups, -3) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~_causal(scores, position), -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    blind = (scores == -torch.inf).all(-1, keepdim=True)  # gets zeros, as fused kernels have it
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    return dropout(weights, dropout_p, **position) @ value


FORMS: frozenset[Callable[..., Tensor]] = frozenset(
    {
        dropout,
        feature_dropout,
        alpha_dropout,
        rrelu,
        bernoulli,
        sampled,
        made,
        attention_with_dropout,
    }
)
"""All functions of local graphs that draw."""


def _drop(tensor: Tensor, keep: Tensor, p: float) -> Tensor:
    return tensor * keep / (1 - p) if p < 1 else torch.zeros_like(tensor)


def _kept(p: float, like: Tensor, position: Mapping[str, Any]) -> Tensor:
    return _drawn(partial(_mask, p), like.shape, torch.bool, like.device, position)


def _kept_channels(p: float, like: Tensor, position: Mapping[str, Any]) -> Tensor:
    """[n, c, 1, …]: shards of further dims see the same numbers."""
    shards = [(axis, s) for axis, s in position["shards"] if parse_state(s).dim < 2]
    narrowed = {**position, "shape": tuple(position["shape"][:2]), "shards": shards}
    keep = _drawn(partial(_mask, p), like.shape[:2], torch.bool, like.device, narrowed)
    return keep.reshape(*keep.shape, *(1 for _ in like.shape[2:]))


def _mask(p: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    empty = torch.empty(shape, dtype=torch.bool, device=generator.device)
    return empty.bernoulli_(1 - p, generator=generator)


def _drawn(
    sample: Callable[[tuple[int, ...], torch.Generator], Tensor],
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    position: Mapping[str, Any],
) -> Tensor:
    """What ``draw`` gives, of local ``shape``; without values where tensors have none."""
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    found = draw(sample, device=device, **position)
    assert found.shape == shape, f"{position['op']}: drew {tuple(found.shape)}, not {tuple(shape)}"
    return found


def _causal(scores: Tensor, position: Mapping[str, Any]) -> Tensor:
    """Which keys each query sees; queries may be a shard of all."""
    rows = torch.arange(position["shape"][-2], device=scores.device)
    for axis, text in position["shards"]:
        state = parse_state(text)
        if state.dim == scores.dim() - 2:
            rows = take_shard(rows, sharded(0, state.blocks), axis.rank, axis.size)
    return torch.arange(scores.shape[-1], device=scores.device) <= rows.unsqueeze(-1)
