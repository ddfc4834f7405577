"""Random models as graphs: an embedding, layers of random ops with a skip from the embedding, a loss.

Sizes divide by 2, 3, 4 and products of two of them, so that most placements are possible.
"""

from __future__ import annotations

import contextlib
import operator
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.functional import token_loss
from autopar.ir.graph import (
    BATCH,
    Block,
    BlockKind,
    LossKind,
    ModelGraph,
    NodeInfo,
    Parameter,
    Role,
    TensorInfo,
    ValueId,
    activation,
    info,
    set_info,
)

SEQ, HIDDEN, HEADS, VOCAB = 12, 24, 12, 48
BATCH_SIZE = 12
DTYPE = torch.float64

aten = torch.ops.aten


class KindBuilder:
    """Builds the graph of one kind; shapes are found by running ops on meta tensors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.graph = fx.Graph()
        self.roles: list[Role] = []
        self.parameter_shapes: list[tuple[int, ...]] = []
        self.calls: list[Callable[[], None]] = []

    def placeholder(
        self, role: Role, shape: tuple[Any, ...], dtype: torch.dtype = DTYPE, *, grad: bool = True
    ) -> fx.Node:
        call = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        with self.graph.inserting_before(call) if call else contextlib.nullcontext():
            node = self.graph.placeholder(f"{role.value}_{len(self.roles)}")
        set_info(
            node, NodeInfo(tensors=(TensorInfo(shape=shape, dtype=dtype, requires_grad=grad),))
        )
        self.roles.append(role)
        return node

    def parameter(self, *shape: int) -> fx.Node:
        self.parameter_shapes.append(shape)
        return self.placeholder(Role.PARAMETER, shape)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call; dim 0 of its results is the batch unless all operands are parameters."""
        node = self.graph.call_function(target, args, kwargs)
        batched = False
        grad = False

        def meta(operand: fx.Node) -> Tensor:
            nonlocal batched, grad
            tensor = info(operand).tensor
            batched |= BATCH in tensor.shape
            grad |= tensor.requires_grad
            return torch.empty(tensor.shape_at(BATCH_SIZE), dtype=tensor.dtype, device="meta")

        value = target(*fx.map_arg(args, meta), **fx.map_arg(kwargs, meta))
        values = tuple(value) if isinstance(value, tuple | list) else (value,)
        tensors = tuple(
            TensorInfo(
                shape=(BATCH, *found.shape[1:]) if batched and found.dim() else tuple(found.shape),
                dtype=found.dtype,
                requires_grad=grad and index == 0 if target is token_loss else grad,
            )
            for index, found in enumerate(values)
        )
        set_info(node, NodeInfo(tensors=tensors, is_tuple=isinstance(value, tuple | list)))
        return node

    def element(self, node: fx.Node, index: int) -> fx.Node:
        read = self.graph.call_function(operator.getitem, (node, index))
        set_info(read, NodeInfo(tensors=(info(node).tensors[index],)))
        return read

    def build(self, *outputs: fx.Node) -> BlockKind:
        self.graph.output(outputs)
        return BlockKind(name=self.name, graph=self.graph, roles=tuple(self.roles))


def _linear(b: KindBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    bias = (b.parameter(HIDDEN),) if rng.random() < 0.5 else ()
    return b.call(aten.linear.default, x, b.parameter(HIDDEN, HIDDEN), *bias)


def _mlp(b: KindBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    up = b.call(aten.linear.default, x, b.parameter(2 * HIDDEN, HIDDEN))
    halves = b.call(aten.split.Tensor, up, HIDDEN, -1)
    gate = b.call(aten.silu.default, b.element(halves, 0))
    product = b.call(aten.mul.Tensor, gate, b.element(halves, 1))
    return b.call(aten.linear.default, product, b.parameter(HIDDEN, HIDDEN))


def _attention(b: KindBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    fused = b.call(aten.linear.default, x, b.parameter(3 * HIDDEN, HIDDEN))
    parts = b.call(aten.chunk.default, fused, 3, -1)
    heads = []
    for index in range(3):
        shape = [-1, SEQ, HEADS, HIDDEN // HEADS]
        split = b.call(aten.reshape.default, b.element(parts, index), shape)
        heads.append(b.call(aten.transpose.int, split, 1, 2))
    attend = aten.scaled_dot_product_attention.default
    attended = b.call(attend, *heads, None, 0.0, rng.random() < 0.5)
    merged = b.call(aten.transpose.int, attended, 1, 2)
    return b.call(aten.reshape.default, merged, [-1, SEQ, HIDDEN])


def _unary(b: KindBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    return b.call(rng.choice([aten.gelu.default, aten.tanh.default, aten.neg.default]), x)


def _scale(b: KindBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    if rng.random() < 0.5:
        return b.call(aten.mul.Tensor, x, 0.5)
    return b.call(rng.choice([aten.mul.Tensor, aten.add.Tensor]), x, b.parameter(HIDDEN))


def _norm(b: KindBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    weights = (b.parameter(HIDDEN), b.parameter(HIDDEN))
    return b.call(aten.layer_norm.default, x, [HIDDEN], *weights)


def _softmax(b: KindBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    return b.call(aten.softmax.int, x, rng.choice([1, 2]))


def _mean(b: KindBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    reduce = rng.choice([aten.mean.dim, aten.sum.dim_IntList])
    mean = b.call(reduce, x, [rng.choice([1, -1])], True)
    return b.call(rng.choice([aten.sub.Tensor, aten.mul.Tensor]), x, mean)


def _cat(b: KindBuilder, x: fx.Node, rng: random.Random) -> fx.Node:
    left = b.call(aten.slice.Tensor, x, 2, 0, HIDDEN // 2)
    right = b.call(aten.slice.Tensor, x, 2, HIDDEN // 2, HIDDEN)
    return b.call(aten.cat.default, [b.call(aten.neg.default, right), left], 2)


_STEPS = (_linear, _mlp, _attention, _unary, _scale, _norm, _softmax, _mean, _cat)


def _body(rng: random.Random, num_steps: int) -> tuple[BlockKind, list[tuple[int, ...]]]:
    builder = KindBuilder("body")
    x = builder.placeholder(Role.ACTIVATION, (BATCH, SEQ, HIDDEN))
    skip = builder.placeholder(Role.ACTIVATION, (BATCH, SEQ, HIDDEN))
    pool = [x, skip]
    for _ in range(num_steps):
        taken = rng.choice(pool[-3:])
        made = rng.choice(_STEPS)(builder, taken, rng)
        pool.append(made)
        if rng.random() < 0.5:
            join = rng.choice([aten.add.Tensor, aten.mul.Tensor])
            pool.append(builder.call(join, rng.choice(pool), made))
    total = builder.call(aten.add.Tensor, x, pool[-1])
    return builder.build(total), builder.parameter_shapes


def _embed() -> BlockKind:
    builder = KindBuilder("embed")
    weight = builder.parameter(VOCAB, HIDDEN)
    ids = builder.placeholder(Role.INPUT, (BATCH, SEQ), torch.int64, grad=False)
    return builder.build(builder.call(aten.embedding.default, weight, ids))


def _head() -> BlockKind:
    builder = KindBuilder("head")
    x = builder.placeholder(Role.ACTIVATION, (BATCH, SEQ, HIDDEN))
    weight = builder.parameter(VOCAB, HIDDEN)
    labels = builder.placeholder(Role.INPUT, (BATCH, SEQ), torch.int64, grad=False)
    logits = builder.call(aten.linear.default, x, weight)
    loss = builder.call(token_loss, logits, labels, -100)
    return builder.build(builder.element(loss, 0), builder.element(loss, 1))


def random_model(
    seed: int, *, layers: int = 2, num_steps: int = 4, tied: bool = True
) -> ModelGraph:
    """A model of ``layers`` blocks of one random kind; with ``tied``, the head uses the embedding's weight."""
    rng = random.Random(seed)
    body, shapes = _body(rng, num_steps)
    kinds = {kind.name: kind for kind in (_embed(), body, _head())}
    parameters = {"embed": _parameter("embed", (VOCAB, HIDDEN))}
    if not tied:
        parameters["head"] = _parameter("head", (VOCAB, HIDDEN))
    blocks = [
        Block(
            index=0,
            kind="embed",
            path="embed",
            bindings=(ValueId(Role.PARAMETER, "embed"), ValueId(Role.INPUT, "ids")),
        )
    ]
    for layer in range(layers):
        names = [f"layers.{layer}.{index}" for index in range(len(shapes))]
        parameters.update(
            (name, _parameter(name, shape)) for name, shape in zip(names, shapes, strict=True)
        )
        values = iter(
            [activation(layer, 0), activation(0, 0), *(ValueId(Role.PARAMETER, n) for n in names)]
        )
        blocks.append(
            Block(
                index=layer + 1,
                kind="body",
                path=f"layers.{layer}",
                bindings=tuple(values),
            )
        )
    weight = ValueId(Role.PARAMETER, "embed" if tied else "head")
    bindings = (activation(layers, 0), weight, ValueId(Role.INPUT, "labels"))
    blocks.append(Block(index=layers + 1, kind="head", path="head", bindings=bindings))
    tokens = TensorInfo(shape=(BATCH, SEQ), dtype=torch.int64, requires_grad=False)
    return ModelGraph(
        name=f"random{seed}",
        blocks=tuple(blocks),
        kinds=kinds,
        parameters=parameters,
        inputs={"ids": tokens, "labels": tokens},
        constants={},
        loss=activation(layers + 1, 0),
        weight=activation(layers + 1, 1),
        loss_kind=LossKind.TOKEN_SUM,
        compute_dtype=DTYPE,
        fingerprint="",
    )


def _parameter(name: str, shape: tuple[int, ...]) -> Parameter:
    return Parameter(name=name, names=(name,), shape=shape, dtype=DTYPE, requires_grad=True)


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
