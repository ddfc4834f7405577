"""Layer and RMS norms: the normalized dims stay whole, all others may be split."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.rules.call import Call
from autopar.ir.rules.core import Rule
from autopar.ir.rules.registry import register

_aten = torch.ops.aten

_TARGETS = [
    _aten.layer_norm.default,
    _aten.native_layer_norm.default,
    _aten.rms_norm.default,
    *([_aten._fused_rms_norm.default] if hasattr(_aten, "_fused_rms_norm") else []),
]


@register(*_TARGETS)
def _norm(node: fx.Node) -> Rule:
    call = Call(node)
    features = " ".join(f"!n{index}" for index in range(len(call.integers("normalized_shape"))))
    # native variants also return statistics, which are not linear in anything
    statistics = ["b.. " + "_ " * len(features.split())] * (len(call.results) - 1)
    return call.text_rule(
        {"input": f"b.. {features}", "weight": features, "bias": features},
        [f"b.. {features}", *statistics],
        linear=[] if statistics else [("weight", "bias")] if call.tensor("bias") else [("weight",)],
    )


@register(_aten.group_norm.default)
def _group_norm(node: fx.Node) -> Rule:
    texts = {"input": "b !c _..", "weight": "!c", "bias": "!c"}
    return Call(node).text_rule(texts, ["b !c _.."])
