"""Strategies that the test suites share: states, placements, small graphs and layouts of them."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor, fx

from autopar.ir import functional
from autopar.ir.errors import PlacementError
from autopar.ir.graph import (
    BATCH,
    BlockKind,
    NodeInfo,
    Role,
    Size,
    TensorInfo,
    evaluate,
    info,
    set_info,
)
from autopar.ir.layout import NodeTyping, operands_of
from autopar.ir.mesh import LAYOUT_AXES
from autopar.ir.placement import INVARIANT, PARTIAL, REPLICATED, Placement, State, sharded
from autopar.ir.rules.core import Option, normal_state
from autopar.ir.rules.local import require_compatible
from autopar.ir.typecheck import (
    KindRules,
    kind_options,
    kind_rules,
    outer_batch,
    placement_error,
    shared_factors_error,
)

Value = TypeVar("Value")
Draw = Callable[[st.SearchStrategy[Value]], Value]

_aten = torch.ops.aten
_PROBE = 97
"""Batch at which shapes are inferred: no other size is a multiple of this prime."""


def states(
    num_dims: int, *, blocks: Sequence[tuple[int, ...]] = ((1,),)
) -> st.SearchStrategy[State]:
    """Any state of a tensor of ``num_dims`` dims, with one of ``blocks`` where it is sharded."""
    plain = st.sampled_from([INVARIANT, REPLICATED, PARTIAL])
    if not num_dims:
        return plain
    shards = st.builds(sharded, st.integers(0, num_dims - 1), st.sampled_from(blocks))
    return plain | shards


@st.composite
def degrees(draw: Draw[Any], *, max_ranks: int = 4) -> dict[str, int]:
    """Ranks on each layout axis, at most ``max_ranks`` together."""
    every = itertools.product(range(1, max_ranks + 1), repeat=len(LAYOUT_AXES))
    fitting = [sizes for sizes in every if math.prod(sizes) <= max_ranks]
    return dict(zip(LAYOUT_AXES, draw(st.sampled_from(fitting)), strict=True))


class KindBuilder:
    """Builds the graph of a kind op by op; shapes are inferred on meta tensors."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.roles: list[Role] = []
        self._values: dict[fx.Node, Any] = {}

    def placeholder(
        self,
        name: str,
        shape: Sequence[Size],
        *,
        role: Role = Role.PARAMETER,
        dtype: torch.dtype = torch.float64,
        requires_grad: bool | None = None,
    ) -> fx.Node:
        """A placeholder, after the others; parameters and activations have gradients."""
        call = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        with self.graph.inserting_before(call) if call else contextlib.nullcontext():
            node = self.graph.placeholder(name)
        self.roles.append(role)
        graded = (
            role in (Role.PARAMETER, Role.ACTIVATION) if requires_grad is None else requires_grad
        )
        sizes = [evaluate(size, _PROBE) for size in shape]
        value = torch.empty(sizes, dtype=dtype, device="meta")
        self._set(node, value.requires_grad_(graded and dtype.is_floating_point))
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """An op. Shape arguments may contain ``BATCH``."""
        probed = _replaced(args, BATCH, _PROBE)
        node = self.graph.call_function(target, probed, kwargs)
        found = target(
            *fx.map_arg(probed, lambda used: self._values[used]),
            **fx.map_arg(kwargs, lambda used: self._values[used]),
        )
        self._set(node, found)
        return node

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """An element of a node with a tuple value."""
        return self.call(operator.getitem, node, index)

    def build(self, name: str, outputs: Sequence[fx.Node]) -> BlockKind:
        """The kind that returns ``outputs``."""
        output = self.graph.output(tuple(outputs))
        set_info(output, NodeInfo(tensors=(), is_tuple=True))
        return BlockKind(name=name, graph=self.graph, roles=tuple(self.roles))

    def shape(self, node: fx.Node) -> tuple[Size, ...]:
        return info(node).tensor.shape

    def _set(self, node: fx.Node, value: Any) -> None:
        self._values[node] = value
        values = value if isinstance(value, list | tuple) else (value,)
        set_info(
            node,
            NodeInfo(
                tensors=tuple(map(_lifted, values)),
                is_tuple=isinstance(value, list | tuple),
                source=f"model.py:{len(self._values)}, in forward",
            ),
        )


def _lifted(value: Tensor) -> TensorInfo:
    shape = tuple(size // _PROBE * BATCH if size % _PROBE == 0 else size for size in value.shape)
    return TensorInfo(shape=shape, dtype=value.dtype, requires_grad=value.requires_grad)


def _replaced(argument: Any, old: object, new: object) -> Any:
    if isinstance(argument, list | tuple):
        return type(argument)(_replaced(item, old, new) for item in argument)
    return new if not isinstance(argument, fx.Node) and argument == old else argument


SEQ, HIDDEN, HEADS, VOCAB = 4, 8, 4, 12


@st.composite
def kinds(draw: Draw[Any], *, max_ops: int = 6, with_loss: bool | None = None) -> BlockKind:
    """A random small block: hidden states ``[b, 4, 8]`` through random ops, with a loss or without.

    With a loss the outputs are loss and weight, else the last hidden states.
    """
    names = draw(st.lists(st.sampled_from(sorted(_STEPS)), min_size=1, max_size=max_ops))
    loss = draw(st.booleans()) if with_loss is None else with_loss
    build = KindBuilder()
    parameters = {
        (index, name): build.placeholder(f"p{index}_{name}", shape)
        for index, step in enumerate(names)
        for name, shape in _STEPS[step][0].items()
    }
    head = build.placeholder("head", (VOCAB, HIDDEN)) if loss else None
    tokens: Any = {"role": Role.INPUT, "dtype": torch.int64}
    targets = build.placeholder("targets", (BATCH, SEQ), **tokens) if loss else None
    if draw(st.booleans()):
        table = build.placeholder("table", (VOCAB, HIDDEN))
        ids = build.placeholder("ids", (BATCH, SEQ), **tokens)
        hidden = build.call(_aten.embedding.default, table, ids)
    else:
        hidden = build.placeholder("hidden", (BATCH, SEQ, HIDDEN), role=Role.ACTIVATION)
    earlier = [hidden]
    for index, step in enumerate(names):
        weights = {name: parameters[index, name] for name in _STEPS[step][0]}
        other = earlier[draw(st.integers(0, len(earlier) - 1))]
        hidden = _STEPS[step][1](build, hidden, other, weights)
        earlier.append(hidden)
    if head is None or targets is None:
        return build.build("random", [hidden])
    logits = build.call(_aten.linear.default, hidden, head)
    result = build.call(functional.token_loss, logits, targets)
    return build.build("random", [build.item(result, 0), build.item(result, 1)])


Step = Callable[[KindBuilder, fx.Node, fx.Node, Mapping[str, fx.Node]], fx.Node]


def _linear(build: KindBuilder, x: fx.Node, _: fx.Node, w: Mapping[str, fx.Node]) -> fx.Node:
    return build.call(_aten.linear.default, x, w["weight"], w["bias"])


def _mlp(build: KindBuilder, x: fx.Node, _: fx.Node, w: Mapping[str, fx.Node]) -> fx.Node:
    up = build.call(_aten.linear.default, x, w["up"])
    return build.call(_aten.linear.default, build.call(_aten.gelu.default, up), w["down"])


def _gated(build: KindBuilder, x: fx.Node, _: fx.Node, w: Mapping[str, fx.Node]) -> fx.Node:
    both = build.call(_aten.linear.default, x, w["up"])
    halves = build.call(_aten.split_with_sizes.default, both, [2 * HIDDEN, 2 * HIDDEN], 2)
    gate, up = build.item(halves, 0), build.item(halves, 1)
    gated = build.call(_aten.mul.Tensor, build.call(_aten.silu.default, gate), up)
    return build.call(_aten.linear.default, gated, w["down"])


def _add(build: KindBuilder, x: fx.Node, other: fx.Node, _: Mapping[str, fx.Node]) -> fx.Node:
    return build.call(_aten.add.Tensor, x, other)


def _mul(build: KindBuilder, x: fx.Node, other: fx.Node, _: Mapping[str, fx.Node]) -> fx.Node:
    return build.call(_aten.mul.Tensor, x, other)


def _norm(build: KindBuilder, x: fx.Node, _: fx.Node, w: Mapping[str, fx.Node]) -> fx.Node:
    return build.call(_aten.layer_norm.default, x, [HIDDEN], w["weight"], w["bias"])


def _softmax(build: KindBuilder, x: fx.Node, _: fx.Node, __: Mapping[str, fx.Node]) -> fx.Node:
    return build.call(_aten.softmax.int, x, -1)


def _mean_free(build: KindBuilder, x: fx.Node, _: fx.Node, __: Mapping[str, fx.Node]) -> fx.Node:
    mean = build.call(_aten.mean.dim, x, [-1], True)
    return build.call(_aten.sub.Tensor, x, mean)


def _attention(build: KindBuilder, x: fx.Node, _: fx.Node, w: Mapping[str, fx.Node]) -> fx.Node:
    fused = build.call(_aten.linear.default, x, w["qkv"])
    parts = build.call(_aten.split_with_sizes.default, fused, [HIDDEN] * 3, 2)
    heads: list[fx.Node] = []
    for index in range(3):
        shape = [BATCH, SEQ, HEADS, HIDDEN // HEADS]
        split = build.call(_aten.reshape.default, build.item(parts, index), shape)
        heads.append(build.call(_aten.transpose.int, split, 1, 2))
    attended = build.call(
        _aten.scaled_dot_product_attention.default, *heads, None, 0.0, is_causal=True
    )
    joined = build.call(_aten.transpose.int, attended, 1, 2)
    merged = build.call(_aten.reshape.default, joined, [BATCH, SEQ, HIDDEN])
    return build.call(_aten.linear.default, merged, w["out"])


_VECTOR = (HIDDEN,)
_STEPS: dict[str, tuple[dict[str, tuple[int, ...]], Step]] = {
    "linear": ({"weight": (HIDDEN, HIDDEN), "bias": _VECTOR}, _linear),
    "mlp": ({"up": (4 * HIDDEN, HIDDEN), "down": (HIDDEN, 4 * HIDDEN)}, _mlp),
    "gated": ({"up": (4 * HIDDEN, HIDDEN), "down": (HIDDEN, 2 * HIDDEN)}, _gated),
    "add": ({}, _add),
    "mul": ({}, _mul),
    "norm": ({"weight": _VECTOR, "bias": _VECTOR}, _norm),
    "softmax": ({}, _softmax),
    "mean_free": ({}, _mean_free),
    "attention": ({"qkv": (3 * HIDDEN, HIDDEN), "out": (HIDDEN, HIDDEN)}, _attention),
}


def random_layout(
    kind: BlockKind, draw: Draw[Any], *, degrees: Mapping[str, int], batch: int
) -> dict[str, NodeTyping]:
    """A well-typed layout of ``kind``: a random option of every op, random states at its ends.

    Args:
        kind: The kind of block; a scalar output counts as a loss, which ends ``I`` or ``P``.
        draw: The draw function of a composite strategy, or ``data.draw``.
        degrees: Ranks on each layout axis.
        batch: Sequences over all data ranks.
    """
    drawer = _LayoutDrawer(kind, draw, degrees, batch)
    return drawer.layout()


class _LayoutDrawer:
    def __init__(
        self, kind: BlockKind, draw: Draw[Any], axis_sizes: Mapping[str, int], batch: int
    ) -> None:
        self.kind, self.draw, self.degrees, self.batch = kind, draw, axis_sizes, batch
        self.rules: KindRules = kind_rules(kind)
        self.options = {
            axis: kind_options(
                kind,
                axis=axis,
                axis_size=axis_sizes[axis],
                batch=outer_batch(batch, axis_sizes, axis),
                rules=self.rules,
            )
            for axis in LAYOUT_AXES
            if axis_sizes[axis] > 1
        }

    def layout(self) -> dict[str, NodeTyping]:
        found: dict[str, NodeTyping] = {}
        roles = dict(zip(self.kind.placeholders, self.kind.roles, strict=True))
        for node in self.kind.graph.nodes:
            if node.op == "placeholder":
                partial = roles[node] is Role.ACTIVATION
                placement = self.placement(info(node).tensor, partial=partial)
                found[node.name] = NodeTyping(operands=(), results=(placement,))
            elif node.op == "output":
                demands = tuple(self.placement(info(used).tensor) for used in operands_of(node))
                found[node.name] = NodeTyping(operands=demands, results=())
            elif node.name in self.rules.rules:
                found[node.name] = self.typing(node)
            else:
                source, index = node.args
                element = found[source.name].results[index]
                found[node.name] = NodeTyping(operands=(), results=(element,))
        return found

    def placement(self, tensor: TensorInfo, *, partial: bool = True) -> Placement:
        """Any placement that divides."""
        candidates = [INVARIANT] if not tensor.shape else [INVARIANT, REPLICATED]
        candidates += [PARTIAL] if partial else []
        candidates += [sharded(dim) for dim in range(len(tensor.shape))]
        chosen = [normal_state(self.draw(st.sampled_from(candidates)), tensor) for _ in LAYOUT_AXES]
        for index in reversed(range(len(chosen))):
            if self.misfit(tuple(chosen), tensor):
                chosen[index] = normal_state(INVARIANT, tensor)
        return tuple(chosen)

    def misfit(self, placement: Placement, tensor: TensorInfo) -> bool:
        error = placement_error(placement, tensor, degrees=self.degrees, batch=self.batch)
        return error is not None

    def typing(self, node: fx.Node) -> NodeTyping:
        chosen = {
            axis: self.draw(st.sampled_from(options[node.name]))
            for axis, options in self.options.items()
        }
        for inner in reversed(self.options):
            if not self.compatible(node, chosen):
                chosen[inner] = next(
                    option
                    for option in self.options[inner][node.name]
                    if set(option.operands + option.results) <= {REPLICATED}
                )
        return _typing(node, chosen)

    def compatible(self, node: fx.Node, chosen: Mapping[str, Option]) -> bool:
        typing = _typing(node, chosen)
        tensors = [info(used).tensor for used in operands_of(node)]
        pairs = [
            *zip(typing.operands, tensors, strict=True),
            *zip(typing.results, info(node).tensors, strict=True),
        ]
        rule = self.rules.rules[node.name]
        if any(self.misfit(placement, tensor) for placement, tensor in pairs):
            return False
        if shared_factors_error(rule, chosen, degrees=self.degrees, batch=self.batch):
            return False
        try:
            require_compatible(node, chosen)
        except PlacementError:
            return False
        return True


def _typing(node: fx.Node, chosen: Mapping[str, Option]) -> NodeTyping:
    """The typing of options on axes of several ranks; on others everything is ``I``."""
    sides = (operands_of(node), info(node).tensors)
    idle = Option(operands=(INVARIANT,) * len(sides[0]), results=(INVARIANT,) * len(sides[1]))
    options = [chosen.get(axis, idle) for axis in LAYOUT_AXES]
    return NodeTyping(
        operands=tuple(zip(*(option.operands for option in options), strict=True)),
        results=tuple(zip(*(option.results for option in options), strict=True)),
    )
