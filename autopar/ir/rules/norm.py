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
    """Channels are split by whole groups: a rank has fewer of them."""
    call = Call(node)
    channels = "(g !c)"
    whole = "_ " * (len(call.shape("input")) - 2)
    return call.text_rule(
        {"input": f"b {channels} {whole}", "weight": channels, "bias": channels},
        [f"b {channels} {whole}"],
        linear=[("weight", "bias")] if call.tensor("bias") else [("weight",)],
        sizes={"g": call.integer("num_groups")},
    )


@register(_aten.batch_norm.default, _aten.instance_norm.default)
def _batch_norm(node: fx.Node) -> Rule:
    """Channels are split freely; sequences where statistics are given, or each one's own."""
    call = Call(node)
    own = node.target is _aten.instance_norm.default
    measured = bool(call.argument("use_input_stats" if own else "training"))
    batch = "!b" if measured and not own else "b"
    spatial = len(call.shape("input")) - 2
    positions = "_ " * spatial if measured else " ".join(f"x{dim}" for dim in range(spatial))
    names = ("weight", "bias", "running_mean", "running_var")
    return call.text_rule(
        {"input": f"{batch} c {positions}", **dict.fromkeys(names, "c")},
        [f"{batch} c {positions}"],
        linear=[("weight", "bias")] if call.tensor("bias") else [("weight",)],
    )
