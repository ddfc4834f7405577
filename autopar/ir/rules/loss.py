"""The token loss: a sum over tokens, with a helper for a split vocabulary."""

from __future__ import annotations

from torch import fx

from autopar.ir import functional
from autopar.ir.placement import INVARIANT, REPLICATED, sharded
from autopar.ir.rules.call import Call
from autopar.ir.rules.core import Option, Rule
from autopar.ir.rules.registry import register


@register(functional.token_loss)
def _token_loss(node: fx.Node) -> Rule:
    call = Call(node)
    vocabulary = Option(
        operands=(sharded(len(call.operands[0].shape) - 1), REPLICATED),
        results=(INVARIANT, INVARIANT),
        helper="vocab_token_loss",
    )
    return call.text_rule({"logits": "b.. !v", "targets": "b.."}, ["", ""], extra=(vocabulary,))
