"""Routed experts: tokens and features split freely, the experts with a helper or an all-to-all."""

from __future__ import annotations

import torch
from torch import fx

import autopar.ir.experts  # defines the op  # noqa: F401  # pyright: ignore[reportUnusedImport]
from autopar.ir.placement import PARTIAL, REPLICATED, State, sharded
from autopar.ir.rules.call import Call
from autopar.ir.rules.core import Dim, Option, Rule, TensorDims
from autopar.ir.rules.registry import register

_TOKENS = ("hidden", "expert_ids", "expert_weights")
_WEIGHTS = ("up", "down", "up_bias", "down_bias")


@register(torch.ops.autopar.routed_experts.default)
def _routed_experts(node: fx.Node) -> Rule:
    """``b.. h, b.. k, b.. k, e f' h, e h f -> b.. h``, where ``f`` is contracted.

    A split of the experts leaves tokens whole and gives ``P``, or sends the tokens of dim 0 to the
    ranks that own their experts. With a capacity a sequence stays whole, which is dim -2.
    """
    call = Call(node)
    *lead, _ = call.shape("hidden")
    sizes = {f"b{dim}": size for dim, size in enumerate(lead)}
    tokens = tuple(Dim((f"b{dim}",)) if size != 1 else Dim() for dim, size in enumerate(lead))
    weights, f = _weight_dims(call)
    capacity = call.argument("capacity_factor") is not None
    whole = [f"b{len(lead) - 1}"] if capacity else []
    token_dims: dict[str, TensorDims] = dict.fromkeys(_TOKENS, (*tokens, Dim()))
    return call.rule(
        {**token_dims, **weights},
        [(*tokens, Dim())],
        {**sizes, "f": f},
        unsplittable=whole,
        linear=[("expert_weights",), ("down", "down_bias")],
        additive=["down_bias"],
        extra=_expert_splits(call, dispatched=not (capacity and len(lead) == 1)),
    )


def _weight_dims(call: Call) -> tuple[dict[str, TensorDims], int]:
    """Dims of the weights by name, and the features of an expert; gated ones are two blocks."""
    transposed = call.argument_or("transposed", False)
    _, *matrix = call.shape("down")
    size = matrix[0 if transposed else 1]
    assert isinstance(size, int), "the features of an expert do not depend on the batch"
    feature = Dim(("f",) if size != 1 else ())
    inner = Dim(feature.factors, (1, 1) if call.argument("gated") else (1,))
    up, down = (Dim(), inner, Dim()), (Dim(), Dim(), feature)
    if transposed:
        up, down = (Dim(), Dim(), inner), (Dim(), feature, Dim())
    dims = {"up": up, "down": down, "up_bias": (Dim(), inner), "down_bias": (Dim(), Dim())}
    return dims, size


def _expert_splits(call: Call, *, dispatched: bool) -> tuple[Option, ...]:
    def option(tokens: State, result: State, helper: str) -> Option:
        states: dict[int, State] = dict.fromkeys(call.indices(*_TOKENS), tokens)
        states.update(dict.fromkeys(call.indices(*_WEIGHTS), sharded(0)))
        operands = tuple(states[index] for index in range(len(states)))
        return Option(operands=operands, results=(result,), helper=helper)

    whole = option(REPLICATED, PARTIAL, "expert_slice")
    return (whole, option(sharded(0), sharded(0), "expert_dispatch")) if dispatched else (whole,)
