"""Hugging Face experts are captured as one op: ``autopar::routed_experts``.

Their own forward passes loop over the experts that were hit, or sort tokens by kernels of one
device. ``transformers`` lets an implementation be registered; while a model is traced, it is ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.host import HOST
from autopar.ir.experts import ACTIVATIONS, routed_experts

_NAME = "autopar"
_FALLBACK = "batched_mm"


@contextmanager
def experts_as_ops(root: nn.Module) -> Iterator[None]:
    """While active, experts in ``root`` (changed: a copy) whose parts the op has are calls of it;
    others multiply by the weights of each token's experts.
    """
    moe = sys.modules.get("transformers.integrations.moe")
    if moe is None:
        yield
        return
    known: dict[int, str] = {}
    for module in root.modules():
        if not hasattr(module, "_is_expert_parallel"):
            continue
        module.config._experts_implementation = _NAME  # type: ignore[union-attr]
        activation = _activation(module) if _is_plain(module, moe) else None
        if activation is not None:
            known[id(module)] = activation
    functions: Any = moe.ALL_EXPERTS_FUNCTIONS

    def experts(module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if id(module) not in known:
            fallback: Callable[..., Tensor] = functions[_FALLBACK]
            return fallback(module, hidden, ids, weights)
        gated = bool(module.has_gate)
        name = "gate_up_proj" if gated else "up_proj"
        biased = bool(module.has_bias)
        return routed_experts(
            hidden,
            ids,
            weights,
            getattr(module, name),
            module.get_parameter("down_proj"),
            getattr(module, f"{name}_bias") if biased else None,
            module.get_parameter("down_proj_bias") if biased else None,
            activation=known[id(module)],
            gated=gated,
            transposed=bool(module.is_transposed),
        )

    functions[_NAME] = experts
    try:
        yield
    finally:
        del functions[_NAME]


def _is_plain(module: Any, moe: Any) -> bool:
    """True if an expert is two products, with a gate in blocks if it has one."""
    gate = type(module)._apply_gate is moe._default_apply_gate and module.is_concatenated
    parts = ("act_fn", "down_proj", "gate_up_proj" if module.has_gate else "up_proj")
    return (
        (gate or not module.has_gate)
        and not module.has_post_expert_norm
        and not module._is_expert_parallel
        and all(hasattr(module, part) for part in parts)
    )


def _activation(module: Any) -> str | None:
    """The name of what ``act_fn`` computes, found by its values."""
    points = torch.linspace(-8, 8, 257, dtype=torch.float64, device=HOST)
    try:
        with torch.no_grad():
            values = module.act_fn(points)
    except Exception:  # not a function of one number
        return None
    for name, function in ACTIVATIONS.items():
        if isinstance(values, Tensor) and torch.allclose(values, function(points), atol=1e-9):
            return name
    return None
