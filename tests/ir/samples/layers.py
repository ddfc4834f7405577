"""Norms, attention, embeddings, losses, experts."""

from __future__ import annotations

import torch

from autopar.ir import functional
from autopar.testing.prove import Fixed, Sample
from tests.ir.samples.source import Source, call, sample


@sample("layer_norm", "native_layer_norm")
def _layer_norm(source: Source, name: str) -> Sample:
    features = source.shape(1, 2)
    x = source.floats(*source.shape(1, 2), *features)
    weight = source.floats(*features) if source.flag() else None
    bias = source.floats(*features) if weight is not None and source.flag() else None
    return call(name, x, features, weight, bias, 1e-5)


@sample("rms_norm")
def _rms_norm(source: Source) -> Sample:
    features = source.shape(1, 2)
    x = source.floats(*source.shape(1, 2), *features)
    return call("rms_norm", x, features, source.floats(*features), 1e-5)


@sample("group_norm")
def _group_norm(source: Source) -> Sample:
    x = source.floats(source.size(), 4, source.size())
    return call("group_norm", x, 2, source.floats(4), source.floats(4), 1e-5)


@sample("scaled_dot_product_attention", "scaled_dot_product_attention dropout")
def _attention(source: Source, name: str) -> Sample:
    batch, heads, features = source.size(), source.size(), source.number(1, 3)
    queries, causal = source.size(), source.flag()
    keys = queries if causal and source.flag() else source.size()
    groups = source.multiple() if source.flag() else 1
    query = source.floats(batch, heads * groups, queries, features)
    key, value = source.floats(batch, heads, keys, features), source.floats(batch, heads, keys, 2)
    mask = None
    if not causal and source.flag():
        mask = source.floats(*source.broadcastable([batch, heads * groups, queries]), keys)
    dropout = 0.3 if name.endswith("dropout") else 0.0
    return call(name.split()[0], query, key, value, mask, dropout, causal, enable_gqa=groups > 1)


@sample("embedding")
def _embedding(source: Source) -> Sample:
    rows = source.size()
    ids = source.integers(rows, *source.shape())
    padding = source.number(-1, rows - 1)
    return call("embedding", source.floats(rows, source.size()), ids, padding)


@sample("embedding scaled")
def _embedding_scaled(source: Source) -> Sample:
    ids = source.integers(4, *source.shape())
    return call("embedding", source.floats(4, source.size()), ids, -1, True)


@sample("token_loss")
def _token_loss(source: Source) -> Sample:
    shape, vocabulary = source.shape(1, 2), source.size()
    targets = source.integers(vocabulary, *shape)
    targets = targets.masked_fill(source.integers(4, *shape) == 0, -100)
    return Sample(target=functional.token_loss, args=(source.floats(*shape, vocabulary), targets))


@sample("routed_experts")
def _routed_experts(source: Source) -> Sample:
    """Ids of no expert, experts without tokens, capacities that drop and that do not."""
    num_experts, hidden, features = source.size(), source.number(1, 4), source.size()
    gated, transposed = source.flag(), source.flag()
    tokens = source.shape(1, 3)
    ids = source.integers(num_experts + 1, *tokens, source.number(1, 3))
    up = [num_experts, features * (1 + gated), hidden]
    down = [num_experts, hidden, features]
    matrices = [[shape[0], *(shape[:0:-1] if transposed else shape[1:])] for shape in (up, down)]
    biases = [source.floats(*up[:2]), source.floats(*down[:2])] if source.flag() else []
    return Sample(
        target=torch.ops.autopar.routed_experts.default,
        args=(
            source.floats(*tokens, hidden),
            ids if source.flag() else ids.clamp_max(0),
            source.floats(*ids.shape),
            *(source.floats(*shape) for shape in matrices),
            *biases,
        ),
        kwargs={
            "activation": ("silu", "gelu_tanh", "relu_squared")[source.number(0, 2)],
            "gated": bool(gated),
            "transposed": bool(transposed),
            "capacity_factor": [None, 0.5, 1.0][source.number(0, 2)],
        },
    )


@sample("token_loss smoothed", "token_loss weighted")
def _token_loss_more(source: Source, name: str) -> Sample:
    shape, vocabulary = source.shape(1, 2), source.size()
    targets = source.integers(vocabulary, *shape)
    targets = targets.masked_fill(source.integers(4, *shape) == 0, -100)
    weight = source.positive(vocabulary) if name.endswith("weighted") else None
    smoothing = 0.3 if weight is None or source.flag() else 0.0
    kwargs = {} if weight is None else {"weight": Fixed(weight)}
    return Sample(
        target=functional.token_loss,
        args=(source.floats(*shape, vocabulary), targets, -100, smoothing),
        kwargs=kwargs,
    )


@sample("cross_entropy_loss", "nll_loss_nd", "nll_loss", "cross_entropy_loss probabilities")
def _class_loss(source: Source, name: str) -> Sample:
    classes = source.number(2, 4)
    dims = [] if name == "nll_loss" else source.shape(0, 1)
    batch = [] if not dims and name != "nll_loss" and source.number(0, 3) == 0 else [source.size()]
    scores = source.floats(*batch, classes, *dims)
    targets = source.integers(classes, *batch, *dims)
    if batch:
        targets = targets.masked_fill(source.integers(4, *batch, *dims) == 0, 1)
    ignored = 1 if batch else -100
    if name.endswith("probabilities"):
        targets, ignored = source.positive(*scores.shape), -100
    targets.flatten()[0] = 0  # one is valid: the mean of none is no number
    weight = Fixed(source.positive(classes)) if source.flag() else None
    args = (scores, targets, weight, source.number(0, 2), ignored)
    return call(name, *args, *([0.2] if name.startswith("cross") and source.flag() else []))


@sample(
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "kl_div",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
def _elementwise_loss(source: Source, name: str) -> Sample:
    shape = source.shape(1, 3)
    given, wanted = source.floats(*shape).sigmoid(), source.floats(*shape).sigmoid()
    weights = [source.positive(*source.broadcastable(shape)) for _ in range(2)]
    if name == "binary_cross_entropy":
        return call(name, given, wanted, Fixed(weights[0]), source.number(0, 2))
    if name == "binary_cross_entropy_with_logits":
        return call(name, given, wanted, *map(Fixed, weights), source.number(0, 2))
    return call(name, given, wanted, source.number(0, 2))


@sample("batch_norm", "instance_norm")
def _batch_norm(source: Source, name: str) -> Sample:
    channels = source.size()
    x = source.floats(source.size() + 1, channels, *[3] * source.number(1, 2))
    affine = [source.floats(channels), source.floats(channels)]
    measured = bool(source.flag())
    statistics = [source.floats(channels), source.positive(channels)]
    given = [None if measured else Fixed(tensor) for tensor in statistics]
    return call(name, x, *affine, *given, measured, 0.1, 1e-5, False)
