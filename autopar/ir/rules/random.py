"""Ops that draw random numbers, as calls of ``autopar.ir.random_ops``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autopar.ir import random_ops
from autopar.ir.errors import PlacementError
from autopar.ir.graph import BATCH, Size, evaluate, info
from autopar.ir.rules.call import Call

_aten = torch.ops.aten

RandomCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""Target, args and kwargs of a call."""


def is_random(node: fx.Node) -> bool:
    """True for ops that draw random numbers; dropout does in training."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if target in _SWITCHES:
        call = Call(node)
        return all(call.argument(name) for name in _SWITCHES[target])
    return True


def require_drawable(node: fx.Node) -> None:
    """Raise ``PlacementError`` if ``node`` draws numbers that have no logical position."""
    if is_random(node):
        random_call(node, (), ())


def has_logical_form(node: fx.Node) -> bool:
    """True for random ops whose numbers can be drawn by logical position."""
    return node.target in _FORMS


def random_call(
    node: fx.Node, shards: Sequence[tuple[Any, str]], size: Sequence[int]
) -> RandomCall:
    """What a random op becomes on a rank.

    Args:
        shards: What stands for each axis that shards the result, the outermost first, and the
            result's state on it.
        size: Shape of the result on a rank.

    Raises:
        PlacementError: The numbers have no logical position.
    """
    if node.target not in _FORMS:
        raise _not_drawable(node, "this op's numbers depend on how it is computed")
    target, args, kwargs = _FORMS[node.target](Call(node))
    if target is random_ops.made:
        kwargs = {**kwargs, "size": list(size)}
    drawn = _drawn_shape(node)
    shape, batch_dim = _per_sequence(node, drawn)
    position = {"op": node.name, "shape": shape, "batch_dim": batch_dim, "shards": tuple(shards)}
    return target, args, {**kwargs, **position}


def _drawn_shape(node: fx.Node) -> tuple[Size, ...]:
    """The shape of the numbers that are drawn: of the result, or of the weights of attention."""
    if node.target is not _aten.scaled_dot_product_attention.default:
        return info(node).tensor.shape
    call = Call(node)
    query, key = call.tensor("query"), call.tensor("key")
    assert query is not None
    assert key is not None
    return (*query.shape[:-1], key.shape[-2])


def _per_sequence(node: fx.Node, shape: Sequence[Size]) -> tuple[tuple[int, ...], int | None]:
    """The shape that one sequence has of a tensor, and the dim along which sequences follow."""
    batched = [dim for dim, size in enumerate(shape) if not isinstance(size, int)]
    sizes = [evaluate(size, 1) for size in shape]
    if any(size - sizes[dim] * BATCH != 0 for dim, size in enumerate(shape) if dim in batched):
        raise _not_drawable(node, f"their shape {tuple(shape)} is not so much per sequence")
    if len(batched) > 1:
        raise _not_drawable(node, f"several dims of their shape {tuple(shape)} have the sequences")
    return tuple(sizes), batched[0] if batched else None


def _not_drawable(node: fx.Node, why: str) -> PlacementError:
    return PlacementError(
        f"{node.name} ({node.target}) draws random numbers on which ranks cannot agree: {why}",
        where=info(node).source or None,
        hint="draw them for each sequence, in the shape of a tensor of the batch: use nn.Dropout, "
        "or torch.rand_like(x)",
    )


_SWITCHES: dict[Any, tuple[str, ...]] = {
    _aten.dropout.default: ("train",),
    _aten.alpha_dropout.default: ("train",),
    _aten.feature_dropout.default: ("train",),
    _aten.feature_alpha_dropout.default: ("train",),
    _aten.rrelu.default: ("training",),
    _aten.scaled_dot_product_attention.default: ("dropout_p",),
    _aten.lstm.input: ("dropout", "train"),
    _aten.gru.input: ("dropout", "train"),
    _aten.rnn_tanh.input: ("dropout", "train"),
    _aten.rnn_relu.input: ("dropout", "train"),
}
"""The arguments without any of which an op draws nothing."""


def _dropout(call: Call) -> RandomCall:
    return random_ops.dropout, (call.argument("input"), call.argument("p")), {}


def _feature_dropout(call: Call) -> RandomCall:
    return random_ops.feature_dropout, (call.argument("input"), call.argument("p")), {}


def _alpha_dropout(call: Call) -> RandomCall:
    args = (call.argument("input"), call.argument("p"))
    return random_ops.alpha_dropout, args, {"channels": False}


def _feature_alpha_dropout(call: Call) -> RandomCall:
    args = (call.argument("input"), call.argument("p"))
    return random_ops.alpha_dropout, args, {"channels": True}


def _rrelu(call: Call) -> RandomCall:
    return random_ops.rrelu, tuple(map(call.argument, ("self", "lower", "upper"))), {}


def _bernoulli(call: Call) -> RandomCall:
    return random_ops.bernoulli, (call.argument("self"), call.argument_or("p", None)), {}


def _law(name: str, *parameters: str | float) -> Callable[[Call], RandomCall]:
    """Numbers of a law, whose parameters are arguments of the op or fixed."""

    def form(call: Call) -> RandomCall:
        values = tuple(call.argument(p) if isinstance(p, str) else p for p in parameters)
        dtype = call.results[0].dtype
        return random_ops.sampled, (call.argument("self"), name, values, dtype), {}

    return form


def _made(name: str, *parameters: str | float) -> Callable[[Call], RandomCall]:
    """As ``_law``, for an op that is told a shape."""

    def form(call: Call) -> RandomCall:
        values = tuple(call.argument(p) if isinstance(p, str) else p for p in parameters)
        return random_ops.made, (name, values), {"dtype": call.results[0].dtype}

    return form


def _attention(call: Call) -> RandomCall:
    """Attention that is not fused: dropout inside a fused kernel depends on its blocking."""
    names = ("query", "key", "value", "dropout_p")
    optional = ("attn_mask", "is_causal", "scale", "enable_gqa")
    return (
        random_ops.attention_with_dropout,
        tuple(map(call.argument, names)),
        {name: call.argument(name) for name in optional},
    )


_FORMS: dict[Any, Callable[[Call], RandomCall]] = {
    _aten.dropout.default: _dropout,
    _aten.feature_dropout.default: _feature_dropout,
    _aten.alpha_dropout.default: _alpha_dropout,
    _aten.feature_alpha_dropout.default: _feature_alpha_dropout,
    _aten.rrelu.default: _rrelu,
    _aten.bernoulli.default: _bernoulli,
    _aten.bernoulli.p: _bernoulli,
    _aten.rand_like.default: _law("uniform", 0.0, 1.0),
    _aten.randn_like.default: _law("normal", 0.0, 1.0),
    _aten.randint_like.default: _law("random", 0, "high"),
    _aten.randint_like.low_dtype: _law("random", "low", "high"),
    _aten.rand.default: _made("uniform", 0.0, 1.0),
    _aten.randn.default: _made("normal", 0.0, 1.0),
    _aten.randint.default: _made("random", 0, "high"),
    _aten.randint.low: _made("random", "low", "high"),
    _aten.uniform.default: _law("uniform", "from", "to"),
    _aten.normal_functional.default: _law("normal", "mean", "std"),
    _aten.exponential.default: _law("exponential", "lambd"),
    _aten.scaled_dot_product_attention.default: _attention,
}
