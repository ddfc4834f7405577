"""Losses: sums over tokens or elements; means with a helper, as is a vocabulary that is split."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from autopar.ir import functional
from autopar.ir.placement import INVARIANT, REPLICATED, State, sharded
from autopar.ir.rules.call import Call
from autopar.ir.rules.core import Option, Rule
from autopar.ir.rules.pointwise import pointwise_rule
from autopar.ir.rules.registry import register

_aten = torch.ops.aten

_NONE, _MEAN, _SUM = range(3)


@register(functional.token_loss)
def _token_loss(node: fx.Node) -> Rule:
    call = Call(node)
    states: dict[int, State] = {call.indices("logits")[0]: sharded(len(call.shape("logits")) - 1)}
    states.update(dict.fromkeys(call.indices("weight"), sharded(0)))
    vocabulary = Option(
        operands=tuple(states.get(index, REPLICATED) for index in range(len(call.operands))),
        results=(INVARIANT, INVARIANT),
        helper="vocab_token_loss",
    )
    return call.text_rule(
        {"logits": "b.. !v", "targets": "b..", "weight": "!v"},
        ["", ""],
        extra=(vocabulary,),
        paddable="v",
    )


@register(_aten.cross_entropy_loss.default, _aten.nll_loss_nd.default, _aten.nll_loss.default)
def _class_loss(node: fx.Node) -> Rule:
    """``b c d.., b d.. -> b d..``, or its sum. A mean divides by the weight of all valid tokens;
    targets that are probabilities have equal weights.
    """
    call = Call(node)
    target = call.tensor("target")
    assert target is not None
    logits = "b !c d.." if len(call.shape("self")) > 1 else "!c"
    tokens = logits.replace("!c", "").strip()
    probabilities = target.dtype.is_floating_point
    reduction = call.integer("reduction")
    rule = call.text_rule(
        {"self": logits, "target": logits if probabilities else tokens, "weight": "!c"},
        [tokens if reduction == _NONE else ""],
    )
    helper = "mean_loss" if probabilities else "token_mean"
    return _with_helper(rule, helper) if reduction == _MEAN else rule


_ELEMENTWISE = """
    mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy
    binary_cross_entropy_with_logits soft_margin_loss poisson_nll_loss
"""


@register(*(getattr(_aten, name).default for name in _ELEMENTWISE.split()))
def _elementwise_loss(node: fx.Node) -> Rule:
    """A loss of every element, or the sum or mean of them."""
    call = Call(node)
    reduction = call.integer("reduction")
    if reduction == _NONE:
        return pointwise_rule(node)
    rule = call.text_rule(dict.fromkeys(call.tensor_names, "d.."), [""])
    return _with_helper(rule, "mean_loss") if reduction == _MEAN else rule


def _with_helper(rule: Rule, helper: str) -> Rule:
    return replace(rule, helpers=dict.fromkeys(rule.split_factors(), helper))
