"""What autograd keeps for backward: a table by op, from the derivative formulas of PyTorch."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.ir.families import LINEAR, Family, family_of
from autopar.ir.graph import Size, info
from autopar.ir.layout import operands_of
from autopar.ir.recompute import op_name
from autopar.ir.rules.call import Call
from autopar.ir.rules.random import is_random
from autopar.solver.costs.experts import ExpertSizes, Shape
from autopar.solver.costs.fusion import PLAIN, SCORES_WRITTEN, NodeStyle
from autopar.solver.costs.products import BIASED
from autopar.solver.costs.work import global_shapes, num_scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Operands and results that an op keeps, and bytes of its own per element of its first operand.

    Views are no tensors of their own: whoever keeps one keeps what it looks at.
    """

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    own_bytes_per_element: int = 0


SCORE_BYTES: Mapping[str, int] = {"eager": 6, "fused_softmax": 5, "fused_causal_softmax": 2}
"""Bytes that are kept of a score in 16 bits: weights, and in fp32 what a softmax in fp32 made."""

PACKED_TENSORS = 3
"""Tensors as large as the queries that FlashAttention 1 keeps beside its operands and its result:
queries, keys and values packed into one, for kernels that take no others. Of pairs of runs that
differ in this kernel only, those with it ran out of memory."""

_NOTHING = Saved()
_KEEPS_NOTHING = LINEAR | {"roll", "flip", "tril", "triu"}
_KEEPS_RESULT = frozenset(
    {
        "rsqrt",
        "sqrt",
        "exp",
        "sigmoid",
        "tanh",
        "softmax",
        "_softmax",
        "log_softmax",
        "_log_softmax",
        "reciprocal",
        "relu",
        "logsumexp",
        "expm1",
    }
)
_KEEPS_OPERAND = frozenset(
    {
        "pow",
        "silu",
        "gelu",
        "cos",
        "sin",
        "log",
        "abs",
        "erf",
        "square",
        "clamp",
        "var",
        "std",
        "layer_norm",
        "native_layer_norm",
        "rms_norm",
        "leaky_relu",
        "softplus",
        "mish",
        "hardswish",
        "elu",
        "group_norm",
    }
)


def saved_for_backward(node: fx.Node, style: NodeStyle = PLAIN) -> Saved:
    """What a ``call_function`` node keeps when its results require gradients."""
    operands = operands_of(node)
    needs = [info(operand).tensor.requires_grad for operand in operands]
    name, family = op_name(node), family_of(node)
    if not any(needs) or family is Family.VIEW:
        return _NOTHING
    if style.fused is not None:
        return _NOTHING if style.fused.is_linear else Saved(operands=style.fused.reads)
    if name in _KEEPS_NOTHING:
        return _NOTHING
    if family is Family.PRODUCT:
        first = 1 if name in BIASED else 0
        pair = (first, first + 1)
        return Saved(operands=tuple(i for i, other in (pair, pair[::-1]) if needs[other]))
    if family is Family.ATTENTION:
        results = () if style.attention in SCORES_WRITTEN else (0,)
        return Saved(operands=tuple(range(len(operands))), results=results)
    if family is Family.EXPERTS:  # what it keeps of its own: own_bytes
        return Saved(operands=Call(node).indices("expert_ids", "expert_weights", "up", "down"))
    if family is Family.EMBEDDING:
        return Saved(operands=(1,))
    if family is Family.LOSS:  # log-softmax, in the dtype of the logits, and the targets
        return Saved(operands=(1,), own_bytes_per_element=info(operands[0]).tensor.dtype.itemsize)
    if name in ("mul", "multiply") and len(operands) == 2:
        return Saved(operands=tuple(i for i in (0, 1) if needs[1 - i]))
    if name in ("mul", "multiply"):
        return _NOTHING
    if name in ("div", "divide", "true_divide"):
        if len(operands) == 1:
            return _NOTHING
        return Saved(operands=(0, 1) if needs[1] else (1,))
    if name in ("dropout", "native_dropout"):
        return Saved(own_bytes_per_element=1)
    if name in ("where", "masked_fill", "gather", "index_select", "index"):
        return Saved(operands=tuple(i for i, need in enumerate(needs) if not need))
    if name in _KEEPS_RESULT:
        return Saved(results=(0,))
    if name in _KEEPS_OPERAND:
        return Saved(operands=(0,))
    return Saved(operands=tuple(range(len(operands))))


def own_bytes(
    node: fx.Node, operands: Sequence[Shape], *, dispatch: int = 1, style: NodeStyle = PLAIN
) -> Size:
    """Bytes that an op keeps which are no operand and no result of it.

    Args:
        operands: Shapes on the rank.
        dispatch, style: See ``forward_work``.
    """
    if not any(info(operand).tensor.requires_grad for operand in operands_of(node)):
        return 0
    if family_of(node) is Family.EXPERTS:
        return ExpertSizes.of(node, operands, dispatch).kept_bytes
    if family_of(node) is Family.ATTENTION and is_random(node):
        # not fused: weights before and after dropout, and the mask
        itemsize = info(operands_of(node)[0]).tensor.dtype.itemsize
        return (2 * itemsize + 1) * num_scores(operands)
    if family_of(node) is Family.ATTENTION and style.attention in SCORES_WRITTEN:
        return SCORE_BYTES[style.attention] * num_scores(operands)
    if family_of(node) is Family.ATTENTION and style.attention == "flash_attention1":
        itemsize = info(operands_of(node)[0]).tensor.dtype.itemsize
        return PACKED_TENSORS * itemsize * math.prod(operands[0])
    if op_name(node) == "rsqrt" and style.fused is None:
        return _normalized_bytes(node) * math.prod(operands[0])
    per_element = saved_for_backward(node).own_bytes_per_element
    return per_element * math.prod(operands[0]) if per_element else 0


def rebuilt_nodes(
    graph: fx.Graph, again: frozenset[fx.Node], styles: Mapping[fx.Node, NodeStyle]
) -> frozenset[fx.Node]:
    """Those of ``again``, which backward computes again, whose results backward reads."""
    found: set[fx.Node] = set()
    if not again:
        return frozenset()
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        saved, operands = saved_for_backward(node, styles.get(node, PLAIN)), operands_of(node)
        read = {_looked_at(operands[index]) for index in saved.operands}
        found |= read & again
        if saved.results and node in again:
            found.add(node)
    return frozenset(found)


def replayed_nodes(
    graph: fx.Graph, recomputed: frozenset[fx.Node], styles: Mapping[fx.Node, NodeStyle]
) -> frozenset[fx.Node]:
    """Those of ``recomputed`` that backward does compute again: what it reads, what keeps bytes of
    its own, and what these are computed from. The others give what no backward needs.
    """
    todo = [*rebuilt_nodes(graph, recomputed, styles)]
    todo += [node for node in recomputed if _keeps_own(node, styles.get(node, PLAIN))]
    found: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            operands = operands_of(node)
            todo += recomputed.intersection([*operands, *map(_looked_at, operands)])
    return frozenset(found)


def _keeps_own(node: fx.Node, style: NodeStyle) -> bool:
    if node.target is operator.getitem:
        return False
    operands, _ = global_shapes(node)
    return bool(own_bytes(node, operands, style=style) != 0)


def _looked_at(node: fx.Node) -> fx.Node:
    """What ``node`` is a view or an element of."""
    while node.op == "call_function":
        if node.target is operator.getitem:
            node = node.all_input_nodes[0]
        elif family_of(node) is Family.VIEW and len(operands_of(node)) == 1:
            (node,) = operands_of(node)
        else:
            break
    return node


def _normalized_bytes(rsqrt: fx.Node) -> int:
    """Bytes per row that a normalization in several kernels keeps beyond its ops: what is scaled
    with weights is kept in the dtype of the statistics, and not in that of the model.
    """
    cast = _reduced(rsqrt)
    if cast is None or op_name(cast) not in ("to", "_to_copy", "type_as"):
        return 0
    wide, narrow = info(cast).tensor, info(cast.all_input_nodes[0]).tensor
    return max(0, wide.dtype.itemsize - narrow.dtype.itemsize) * int(wide.shape[-1])


def _reduced(rsqrt: fx.Node) -> fx.Node | None:
    """What the statistics of a normalization are taken of; None where there are none."""
    node = rsqrt
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        if op_name(node) in ("mean", "var", "sum"):
            reduced = node.all_input_nodes[0]
            return reduced.all_input_nodes[0] if op_name(reduced) == "pow" else reduced
    return None
