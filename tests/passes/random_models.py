"""Random models as graphs: an embedding, layers of random ops with a skip from the embedding, a
loss.

Sizes divide by 2, 3, 4 and products of two of them, so that most placements are possible.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, fx

from autopar.ir.functional import token_loss
from autopar.ir.graph import (
    BATCH,
    Block,
    BlockKind,
    LossKind,
    ModelGraph,
    Parameter,
    Role,
    TensorInfo,
    ValueId,
    activation,
)
from tests.strategies import KindBuilder

SEQ, HIDDEN, HEADS, VOCAB = 12, 24, 12, 48
BATCH_SIZE = 12
DTYPE = torch.float64

aten = torch.ops.aten


class BodyBuilder(KindBuilder):
    """Makes parameters as ops need them."""

    def __init__(self) -> None:
        super().__init__()
        self.parameter_shapes: list[tuple[int, ...]] = []

    def parameter(self, *shape: int) -> fx.Node:
        self.parameter_shapes.append(shape)
        return self.placeholder(f"parameter_{len(self.parameter_shapes)}", shape)


def _linear(b: BodyBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    bias = (b.parameter(HIDDEN),) if rng.random() < 0.5 else ()
    return b.call(aten.linear.default, x, b.parameter(HIDDEN, HIDDEN), *bias)


def _mlp(b: BodyBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    up = b.call(aten.linear.default, x, b.parameter(2 * HIDDEN, HIDDEN))
    halves = b.call(aten.split.Tensor, up, HIDDEN, -1)
    gate = b.call(aten.silu.default, b.item(halves, 0))
    product = b.call(aten.mul.Tensor, gate, b.item(halves, 1))
    return b.call(aten.linear.default, product, b.parameter(HIDDEN, HIDDEN))


def _attention(b: BodyBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    fused = b.call(aten.linear.default, x, b.parameter(3 * HIDDEN, HIDDEN))
    parts = b.call(aten.chunk.default, fused, 3, -1)
    heads = []
    for index in range(3):
        shape = [-1, SEQ, HEADS, HIDDEN // HEADS]
        split = b.call(aten.reshape.default, b.item(parts, index), shape)
        heads.append(b.call(aten.transpose.int, split, 1, 2))
    attend = aten.scaled_dot_product_attention.default
    attended = b.call(attend, *heads, None, 0.0, rng.random() < 0.5)
    merged = b.call(aten.transpose.int, attended, 1, 2)
    return b.call(aten.reshape.default, merged, [-1, SEQ, HIDDEN])


def _unary(b: BodyBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    return b.call(rng.choice([aten.gelu.default, aten.tanh.default, aten.neg.default]), x)


def _scale(b: BodyBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    if rng.random() < 0.5:
        return b.call(aten.mul.Tensor, x, 0.5)
    return b.call(rng.choice([aten.mul.Tensor, aten.add.Tensor]), x, b.parameter(HIDDEN))


def _norm(b: BodyBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    weights = (b.parameter(HIDDEN), b.parameter(HIDDEN))
    return b.call(aten.layer_norm.default, x, [HIDDEN], *weights)


def _softmax(b: BodyBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    return b.call(aten.softmax.int, x, rng.choice([1, 2]))


def _mean(b: BodyBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    reduce = rng.choice([aten.mean.dim, aten.sum.dim_IntList])
    mean = b.call(reduce, x, [rng.choice([1, -1])], True)
    return b.call(rng.choice([aten.sub.Tensor, aten.mul.Tensor]), x, mean)


def _cat(b: BodyBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    left = b.call(aten.slice.Tensor, x, 2, 0, HIDDEN // 2)
    right = b.call(aten.slice.Tensor, x, 2, HIDDEN // 2, HIDDEN)
    return b.call(aten.cat.default, [b.call(aten.neg.default, right), left], 2)


_STEPS = (_linear, _mlp, _attention, _unary, _scale, _norm, _softmax, _mean, _cat)


def _body(rng: random.Random, num_steps: int) -> tuple[BlockKind, list[tuple[int, ...]]]:
    builder = BodyBuilder()
    x = builder.placeholder("x", (BATCH, SEQ, HIDDEN), role=Role.ACTIVATION)
    skip = builder.placeholder("skip", (BATCH, SEQ, HIDDEN), role=Role.ACTIVATION)
    pool = [x, skip]
    for _ in range(num_steps):
        made = rng.choice(_STEPS)(builder, rng.choice(pool[-3:]), rng)
        pool.append(made)
        if rng.random() < 0.5:
            join = rng.choice([aten.add.Tensor, aten.mul.Tensor])
            pool.append(builder.call(join, rng.choice(pool), made))
    total = builder.call(aten.add.Tensor, x, pool[-1])
    return builder.build("body", [total]), builder.parameter_shapes


def _embed() -> BlockKind:
    builder = KindBuilder()
    weight = builder.placeholder("weight", (VOCAB, HIDDEN))
    ids = builder.placeholder("ids", (BATCH, SEQ), role=Role.INPUT, dtype=torch.int64)
    return builder.build("embed", [builder.call(aten.embedding.default, weight, ids)])


def _head() -> BlockKind:
    builder = KindBuilder()
    x = builder.placeholder("x", (BATCH, SEQ, HIDDEN), role=Role.ACTIVATION)
    weight = builder.placeholder("weight", (VOCAB, HIDDEN))
    labels = builder.placeholder("labels", (BATCH, SEQ), role=Role.INPUT, dtype=torch.int64)
    logits = builder.call(aten.linear.default, x, weight)
    loss = builder.call(token_loss, logits, labels, -100)
    return builder.build("head", [builder.item(loss, 0), builder.item(loss, 1)])


def random_model(
    seed: int, *, layers: int = 2, num_steps: int = 4, tied: bool = True
) -> ModelGraph:
    """A model of ``layers`` blocks of one random kind between an embedding and a head.

    Tied, the head uses the weight of the embedding.
    """
    body, shapes = _body(random.Random(seed), num_steps)
    names = ("embed",) if tied else ("embed", "head")
    parameters: dict[str, tuple[int, ...]] = dict.fromkeys(names, (VOCAB, HIDDEN))
    bindings: list[tuple[str, str, tuple[ValueId, ...]]] = [
        ("embed", "embed", (_parameter("embed"), ValueId(Role.INPUT, "ids")))
    ]
    for layer in range(layers):
        own = {f"layers.{layer}.{index}": shape for index, shape in enumerate(shapes)}
        parameters.update(own)
        values = (activation(layer, 0), activation(0, 0), *map(_parameter, own))
        bindings.append(("body", f"layers.{layer}", values))
    head = _parameter("embed" if tied else "head")
    values = (activation(layers, 0), head, ValueId(Role.INPUT, "labels"))
    bindings.append(("head", "head", values))
    tokens = TensorInfo(shape=(BATCH, SEQ), dtype=torch.int64, requires_grad=False)
    return ModelGraph(
        name=f"random{seed}",
        blocks=tuple(
            Block(index=index, kind=kind, path=path, bindings=values)
            for index, (kind, path, values) in enumerate(bindings)
        ),
        kinds={kind.name: kind for kind in (_embed(), body, _head())},
        parameters={
            name: Parameter(name=name, names=(name,), shape=shape, dtype=DTYPE, requires_grad=True)
            for name, shape in parameters.items()
        },
        inputs={"ids": tokens, "labels": tokens},
        constants={},
        loss=activation(layers + 1, 0),
        weight=activation(layers + 1, 1),
        loss_kind=LossKind.TOKEN_SUM,
        compute_dtype=DTYPE,
        fingerprint="",
    )


def _parameter(name: str) -> ValueId:
    return ValueId(Role.PARAMETER, name)


def random_values(model: ModelGraph, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and inputs (a global micro-batch of ``BATCH_SIZE`` sequences)."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {
        name: torch.randn(parameter.shape, generator=generator, dtype=DTYPE) * 0.2
        for name, parameter in model.parameters.items()
    }
    ids = torch.randint(0, VOCAB, (BATCH_SIZE, SEQ), generator=generator)
    labels = torch.randint(0, VOCAB, (BATCH_SIZE, SEQ), generator=generator)
    ignored = torch.rand(BATCH_SIZE, SEQ, generator=generator) < 0.125
    return parameters, {"ids": ids, "labels": labels.masked_fill(ignored, -100)}
