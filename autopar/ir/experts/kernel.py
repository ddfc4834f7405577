"""What routed experts compute: tokens in order of expert, two grouped products, weighted sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from autopar.ir.deferral import apart_inside
from autopar.ir.errors import InputError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda tensor: functional.gelu(tensor, approximate="tanh"),
    "identity": lambda tensor: tensor,
    "quick_gelu": lambda tensor: tensor * torch.sigmoid(1.702 * tensor),
    "relu": functional.relu,
    "relu_squared": lambda tensor: functional.relu(tensor).square(),
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "tanh": torch.tanh,
}
"""What an expert may have between its two products, by the name that the op takes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertWeights:
    """The weights of all experts of a rank, and how they are used: see ``routed_experts``."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    gated: bool
    transposed: bool

    @property
    def num_experts(self) -> int:
        return self.up.shape[0]


def check_shapes(
    hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, weights: ExpertWeights
) -> None:
    """Raise ``InputError`` unless an op can be made of these tensors."""
    where = "routed_experts"
    if weights.activation not in ACTIVATIONS:
        raise InputError(
            f"there is no activation {weights.activation!r} of experts",
            where=where,
            hint=f"one of {', '.join(ACTIVATIONS)}",
        )
    up, down = weights.up, weights.down
    turn = slice(None, None, -1) if weights.transposed else slice(None)
    fits = (
        up.dim() == down.dim() == 3
        and up.shape[0] == down.shape[0]
        and expert_ids.dim() == hidden.dim() >= 2
        and expert_ids.shape == expert_weights.shape
        and expert_ids.shape[:-1] == hidden.shape[:-1]
    )
    if fits:
        inner, before = up.shape[-2:][turn]
        after, features = down.shape[-2:][turn]
        fits = before == after == hidden.shape[-1]
        fits = fits and inner == features * (2 if weights.gated else 1)
    if not fits:
        given = {
            "hidden": hidden,
            "expert_ids": expert_ids,
            "expert_weights": expert_weights,
            "up": up,
            "down": down,
        }
        listed = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in given.items())
        raise InputError(
            f"the shapes do not fit: {listed} "
            f"(gated={weights.gated}, transposed={weights.transposed})",
            where=where,
            hint="up is [e, f', h] and down [e, h, f], with f' = 2f for gated experts",
        )


def compute_experts(
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    weights: ExpertWeights,
    *,
    capacity_factor: float | None = None,
) -> Tensor:
    """The result of ``routed_experts``, from differentiable ops."""
    ids = within_capacity(expert_ids, weights.num_experts, capacity_factor)
    order, counts = by_expert(ids, weights.num_experts)
    rows = hidden.flatten(0, -2)[order // expert_ids.shape[-1]]
    results = grouped_experts(rows, counts, weights)
    return combine(results, order, expert_weights).view(hidden.shape)


def within_capacity(ids: Tensor, num_experts: int, capacity_factor: float | None) -> Tensor:
    """``ids`` with -1 where an expert has taken as many tokens of the sequence as it may."""
    if capacity_factor is None:
        return ids
    slots = ids.shape[-2] * ids.shape[-1]
    capacity = math.ceil(capacity_factor * slots / num_experts)
    flat = ids.reshape(-1, slots)
    ordered, order = torch.sort(flat, dim=-1, stable=True)
    place = torch.arange(slots, device=ids.device) - torch.searchsorted(ordered, ordered)
    taken = torch.empty_like(place).scatter_(-1, order, place)
    return flat.masked_fill(taken >= capacity, -1).reshape(ids.shape)


def by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Places of ``ids.flatten()`` in order of expert, without invalid ones; and each one's count.

    Tensors without memory say nothing of their values: there every id counts as valid.
    """
    flat = ids.flatten()
    key = flat.masked_fill((flat < 0) | (flat >= num_experts), num_experts)
    order = key.argsort(stable=True)
    if ids.is_meta:
        return order, flat.new_empty(num_experts)
    counts = torch.bincount(key, minlength=num_experts + 1)[:num_experts]
    return order[: int(counts.sum())], counts


def as_numbers(counts: Tensor, total: int) -> list[int]:
    """``counts`` as numbers; even shares of ``total`` for tensors without memory."""
    if not counts.is_meta:
        return counts.tolist()
    share, rest = divmod(total, counts.shape[0])
    return [share + (index < rest) for index in range(counts.shape[0])]


def grouped_experts(rows: Tensor, counts: Tensor, weights: ExpertWeights) -> Tensor:
    """The experts' results for ``rows``, of which ``counts[i]`` in a row are expert i's."""
    act = ACTIVATIONS[weights.activation]
    turned = weights.transposed
    inner = _grouped_linear(rows, counts, weights.up, weights.up_bias, transposed=turned)
    if weights.gated:
        gate, rest = inner.chunk(2, -1)
        inner = act(gate) * rest
    else:
        inner = act(inner)
    return _grouped_linear(inner, counts, weights.down, weights.down_bias, transposed=turned)


def combine(results: Tensor, order: Tensor, expert_weights: Tensor) -> Tensor:
    """The weighted sum of each token's results: ``[tokens, h]``, the same whatever their order."""
    weighted = results * expert_weights.flatten()[order].unsqueeze(-1).to(results.dtype)
    placed = results.new_zeros(expert_weights.numel(), results.shape[-1])
    placed = placed.index_copy(0, order, weighted)
    return placed.unflatten(0, (-1, expert_weights.shape[-1])).sum(1)


def _grouped_linear(
    rows: Tensor, counts: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool
) -> Tensor:
    """``rows[i] @ weight[expert of i]`` and the bias; the gradients of both may come later."""
    weights = (2,) if bias is None else (2, 3)
    product = apart_inside(_product_of_groups, weights)
    return product(rows, counts, weight, bias, transposed=transposed)


def _product_of_groups(
    rows: Tensor, counts: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool
) -> Tensor:
    """One grouped kernel where there is one."""
    if _has_grouped_kernel(rows, weight):
        matrices = weight if transposed else weight.transpose(-2, -1)
        ends = counts.cumsum(0).to(torch.int32)
        result = functional.grouped_mm(rows, matrices, offs=ends)
        if bias is None:
            return result
        return result + bias.repeat_interleave(counts, 0, output_size=rows.shape[0])
    parts = rows.split(as_numbers(counts, rows.shape[0]))
    biases = [None] * len(parts) if bias is None else bias.unbind()
    # unbind: the gradients of all experts are stacked once
    matrices_of = (weight.transpose(-2, -1) if transposed else weight).unbind()
    return torch.cat(
        [
            functional.linear(part, matrix, own)
            for part, matrix, own in zip(parts, matrices_of, biases, strict=True)
        ]
    )


def _has_grouped_kernel(rows: Tensor, weight: Tensor) -> bool:
    """On GPUs, in bfloat16, where rows of operands are multiples of 16 bytes."""
    return (
        rows.is_cuda
        and rows.dtype == weight.dtype == torch.bfloat16
        and rows.shape[0] > 0
        and weight.shape[-1] % 8 == 0
        and weight.shape[-2] % 8 == 0
    )
