"""The op ``autopar::routed_experts``: its schema, and what it does while a graph is traced.

``torch.export`` keeps it whole. Its kernel is a chain of differentiable PyTorch ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from autopar.ir.experts.kernel import ExpertWeights, check_shapes, compute_experts


def routed_experts(
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str,
    gated: bool,
    transposed: bool = False,
    capacity_factor: float | None = None,
) -> Tensor:
    """``y[t] = Σ_k expert_weights[t, k] · FFN_{expert_ids[t, k]}(hidden[t])``, ``[…, h]``.

    An expert is ``down · act(up · x + up_bias) + down_bias``; a gated one multiplies
    ``act(gate)`` by the rest, where ``up`` stacks the rows of the gate on those of the rest. An id
    that is negative or not below ``e`` contributes nothing. No token is dropped, unless
    ``capacity_factor`` says so.

    Args:
        hidden: ``[…, h]``, tokens with any number of leading dims.
        expert_ids: ``[…, k]``, int64: the experts of every token.
        expert_weights: ``[…, k]``: what their results are multiplied by.
        up: ``[e, f', h]`` with ``f' = 2f`` for gated experts and ``f`` for others.
        down: ``[e, h, f]``.
        up_bias: ``[e, f']``.
        down_bias: ``[e, h]``.
        activation: One of ``ACTIVATIONS``.
        gated: See above.
        transposed: ``up`` is ``[e, h, f']`` and ``down`` ``[e, f, h]``.
        capacity_factor: Each expert takes at most ``ceil(capacity_factor · s · k / e)`` of the
            ``s`` tokens of a sequence (``hidden`` is ``[…, s, h]``), the first ones by position;
            the others get nothing from it.

    Raises:
        InputError: If ``activation`` is unknown, or the shapes do not fit.
    """
    return torch.ops.autopar.routed_experts(
        hidden,
        expert_ids,
        expert_weights,
        up,
        down,
        up_bias,
        down_bias,
        activation=activation,
        gated=gated,
        transposed=transposed,
        capacity_factor=capacity_factor,
    )


def _kernel(
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *weights: Tensor | None,
    capacity_factor: float | None = None,
    **settings: Any,
) -> Tensor:
    experts = _experts(*weights, **settings)
    check_shapes(hidden, expert_ids, expert_weights, experts)
    return compute_experts(
        hidden, expert_ids, expert_weights, experts, capacity_factor=capacity_factor
    )


def _shape_only(
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *weights: Tensor | None,
    capacity_factor: float | None = None,
    **settings: Any,
) -> Tensor:
    check_shapes(hidden, expert_ids, expert_weights, _experts(*weights, **settings))
    return torch.empty_like(hidden)


def _experts(
    up: Tensor | None,
    down: Tensor | None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str,
    gated: bool,
    transposed: bool = False,
) -> ExpertWeights:
    assert up is not None
    assert down is not None
    return ExpertWeights(
        up=up,
        down=down,
        up_bias=up_bias,
        down_bias=down_bias,
        activation=activation,
        gated=gated,
        transposed=transposed,
    )


def _differentiable(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The kernel is differentiable by its parts; tensors that are traced have a shape only."""
    if isinstance(hidden, FakeTensor | FunctionalTensor):
        traced: Tensor = _Traced.apply(kwargs, hidden, *args)
        return traced
    return _kernel(hidden, *args, **kwargs)


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kwargs: dict[str, Any], *args: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportPrivateUsage]
            return torch.ops.autopar.routed_experts(*args, **kwargs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("a traced op has no backward: differentiate the local graph")


_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define(
    "routed_experts(Tensor hidden, Tensor expert_ids, Tensor expert_weights, Tensor up, "
    "Tensor down, Tensor? up_bias=None, Tensor? down_bias=None, *, str activation, bool gated, "
    "bool transposed=False, float? capacity_factor=None) -> Tensor"
)
_LIBRARY.impl("routed_experts", _kernel, "CompositeExplicitAutograd")
_LIBRARY.impl("routed_experts", _differentiable, "Autograd")
torch.library.register_fake("autopar::routed_experts", _shape_only, lib=_LIBRARY)
