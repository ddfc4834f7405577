"""What a plan computes again in backward: whole blocks, or some nodes of every block.

==================  ================================================================================
``none``            nothing
``selective``       the attention core: all that makes and uses scores. An op of attention is one;
                    where a model writes attention as ops, it is the product that makes the scores,
                    the product that uses them, and what stands between them
``selective_op``    every op but products (linear, matmul, convolution, routed experts, recurrent
                    layers), fused attention, and ops that communicate
``selective_layer``  every other one of the repeated blocks
``blocks``          the blocks that the plan lists, each whole or by the ops of ``selective_op``: as
                    little as makes it fit into memory
``full``            every block
==================  ================================================================================

Beside any of these a plan lists blocks that are not computed again as a whole and that *gather
again*: what ranks of the tensor axis gather from their shards is kept no longer than forward needs
it, and gathered from the shards once more in backward.

The block that makes the loss is never recomputed: its backward follows at once.

Kept are, where nodes are recomputed: what backward of the *other* nodes needs, unless it is the
result of a recomputed node (or a view of one); and those results of other nodes, and arguments of
the block, from which recomputed nodes are computed again, if backward needs what they give or what
they keep themselves. Where a block is recomputed: its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx
from torch._ops import OpOverload

from autopar.ir.graph import ModelGraph, info
from autopar.ir.kernels import AttentionKernel
from autopar.ir.mesh import TENSOR_AXIS
from autopar.ir.moves import Collective, collective_of, move
from autopar.ir.placement import State, parse_state
from autopar.ir.plan import RecomputeName
from autopar.ir.program import axis_name

ATTENTION_OPS = frozenset(
    {
        "scaled_dot_product_attention",
        "causal_attention",
        "eager_attention",
        "attention_with_dropout",
    }
)
"""Attention as one op: PyTorch's, and its local forms."""

_FUSED: tuple[AttentionKernel, ...] = ("flash_attention1", "flash_attention2")

MATRIX_PRODUCTS = frozenset(
    {
        "linear",
        "matmul",
        "mm",
        "bmm",
        "mv",
        "dot",
        "addmm",
        "addmv",
        "baddbmm",
        "tensordot",
        "conv1d",
        "conv2d",
        "conv3d",
        "convolution",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "_grouped_mm",
        "grouped_mm_fallback",
    }
)
"""Products of matrices, by the name of the op."""

_SCORE_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})
_PRODUCTS = MATRIX_PRODUCTS | {
    "einsum",
    "bilinear",
    "routed_experts",
    "expert_slice",
    "expert_dispatch",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
}
_SILENT = ATTENTION_OPS | {
    "vocab_embedding",
    "partial_mean",
    "dropout",
    "feature_dropout",
    "alpha_dropout",
    "rrelu",
    "bernoulli",
    "sampled",
    "made",
}
"""Local forms that know an axis, and send nothing along it."""


def recomputed_blocks(
    model: ModelGraph, recompute: RecomputeName, listed: Iterable[int] = ()
) -> frozenset[int]:
    """Indices of the blocks that are computed again as a whole.

    Repeated blocks are those whose kind has several; ``listed`` are those of a plan.
    """
    last = model.producer(model.loss)[0]
    if recompute == "blocks":
        return frozenset(listed) - {last}
    if recompute == "full":
        return frozenset(block.index for block in model.blocks) - {last}
    if recompute != "selective_layer":
        return frozenset()
    counts = model.multiplicity()
    repeated = [b.index for b in model.blocks if counts[b.kind] > 1 and b.index != last]
    return frozenset(repeated[1::2])


def blocks_by_op(
    model: ModelGraph, recompute: RecomputeName, listed: Iterable[int] = ()
) -> frozenset[int]:
    """Indices of the blocks of which ``recomputed_nodes`` are computed again one by one; ``listed``
    are those of a plan.
    """
    if recompute == "blocks":
        found = frozenset(listed)
    elif recompute in ("selective", "selective_op"):
        found = frozenset(block.index for block in model.blocks)
    else:
        found = frozenset()
    return found - {model.producer(model.loss)[0]}


def recomputed_nodes(
    graph: fx.Graph, recompute: RecomputeName, attention: AttentionKernel
) -> frozenset[fx.Node]:
    """The nodes of a block's graph, global or local, that are computed again one by one.

    Args:
        graph: Of one of ``blocks_by_op``.
        recompute: For those that only recompute whole blocks there are none.
        attention: Says whether an op of attention is one kernel, or several with scores between.
    """
    if recompute == "selective":
        return _attention_cores(graph)
    if recompute in ("selective_op", "blocks"):
        is_fused = attention in _FUSED
        calls = (node for node in graph.nodes if node.op == "call_function")
        return frozenset(node for node in calls if not _is_kept(node, is_fused))
    return frozenset()


def gathering_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """The moves of a block's local graph that are made again where a block gathers again: from a
    shard on the tensor axis to the whole. A value that another axis has moved before is kept.
    """
    return frozenset(node for node in graph.nodes if node.target is move and _gathers(node))


def is_gather(source: State, target: State) -> bool:
    """Whether a move makes the whole from shards."""
    return target.is_whole and collective_of(source, target) is Collective.ALL_GATHER


def _gathers(node: fx.Node) -> bool:
    value, handle, source, target = node.args
    assert isinstance(value, fx.Node)
    assert isinstance(handle, fx.Node)
    if value.target is move or axis_name(handle) != TENSOR_AXIS:
        return False
    return is_gather(parse_state(str(source)), parse_state(str(target)))


def _is_kept(node: fx.Node, is_fused: bool) -> bool:
    """Whether ``selective_op`` keeps what ``node`` gives."""
    name = op_name(node)
    if name in ATTENTION_OPS:
        return is_fused and not _drops(node)
    return name in _PRODUCTS or _communicates(node)


def _drops(node: fx.Node) -> bool:
    """Whether attention drops weights: no fused kernel does it by logical position."""
    if not isinstance(node.target, OpOverload):
        return op_name(node) == "attention_with_dropout"
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    return dropout not in (0, None)


def _communicates(node: fx.Node) -> bool:
    if node.target is move:
        source, target = (parse_state(str(text)) for text in node.args[2:4])
        return collective_of(source, target) is not Collective.NONE
    if isinstance(node.target, OpOverload) or op_name(node) in _SILENT:
        return False
    return any(operand.op == "get_attr" for operand in node.all_input_nodes)


def _attention_cores(graph: fx.Graph) -> frozenset[fx.Node]:
    found = {node for node in graph.nodes if op_name(node) in ATTENTION_OPS}
    for node in graph.nodes:
        if _is_softmax_of_rows(node):
            found |= _core_around(node)
    return frozenset(found)


def _core_around(softmax: fx.Node) -> set[fx.Node]:
    """The nodes from the products that make the scores of ``softmax`` to those that use them."""
    before, makers = _reach(softmax, _operands)
    after, readers = _reach(softmax, _users)
    if not makers or not readers:
        return set()
    return (
        {softmax}
        | makers
        | readers
        | _within(before, makers, _users)
        | _within(after, readers, _operands)
    )


_Step = Callable[[fx.Node], Iterable[fx.Node]]


def _operands(node: fx.Node) -> Iterable[fx.Node]:
    return node.all_input_nodes


def _users(node: fx.Node) -> Iterable[fx.Node]:
    return node.users


def _reach(start: fx.Node, following: _Step) -> tuple[set[fx.Node], set[fx.Node]]:
    """What is reached from ``start`` without passing a product, and the score products at the
    ends.
    """
    between: set[fx.Node] = set()
    ends: set[fx.Node] = set()
    todo = list(following(start))
    while todo:
        node = todo.pop()
        name = op_name(node)
        if node in between or node.op != "call_function":
            continue
        if name in _SCORE_PRODUCTS:
            ends.add(node)
        elif name not in _PRODUCTS and name not in ATTENTION_OPS:
            between.add(node)
            todo.extend(following(node))
    return between, ends


def _within(allowed: set[fx.Node], starts: Iterable[fx.Node], following: _Step) -> set[fx.Node]:
    """Those of ``allowed`` that are reached from ``starts`` through others of them."""
    found: set[fx.Node] = set()
    todo = [node for start in starts for node in following(start)]
    while todo:
        node = todo.pop()
        if node in allowed and node not in found:
            found.add(node)
            todo.extend(following(node))
    return found


_SOFTMAX = (
    torch.ops.aten.softmax.int,
    torch.ops.aten._softmax.default,
    torch.ops.aten._safe_softmax.default,
)


def _is_softmax_of_rows(node: fx.Node) -> bool:
    if node.target not in _SOFTMAX:
        return False
    dim = node.args[1] if len(node.args) > 1 else node.kwargs["dim"]
    return dim in (-1, len(info(node).tensor.shape) - 1)


def op_name(node: fx.Node) -> str:
    """``mul`` for ``aten.mul.Tensor``, or the name of the function; nothing for other nodes."""
    if node.op != "call_function":
        return ""
    target = node.target
    if isinstance(target, OpOverload):
        return str(target.overloadpacket.__name__)
    return str(getattr(target, "__name__", target))
