"""What an op computes and moves: products of matrices, attention, bytes of memory, kernels.

Shapes may hold sympy expressions of the batch: then so does the work. A rank's share under a typing
is the work on its local shapes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.ir.graph import BlockKind, Size, info
from autopar.ir.layout import operands_of
from autopar.ir.rules.call import Call
from autopar.ir.rules.random import is_random
from autopar.solver.costs.experts import ExpertSizes
from autopar.solver.costs.families import LINEAR, Family, family_of, op_name
from autopar.solver.costs.products import BIASED, Product, Shape, numel, product_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """FLOPs of a fused attention kernel; causal ones do half of the scores."""

    flops: Size
    itemsize: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One direction of an op. ``bytes`` are those of its memory-bound kernels only."""

    products: tuple[Product, ...] = ()
    attention: Attention | None = None
    bytes: Size = 0
    num_kernels: int = 0

    @property
    def flops(self) -> Size:
        """FLOPs of products and attention."""
        total: Size = sum((product.flops for product in self.products), 0)
        return total + self.attention.flops if self.attention else total


NO_WORK = Work()


def forward_work(
    node: fx.Node, operands: Sequence[Shape], results: Sequence[Shape], *, dispatch: int = 1
) -> Work:
    """The forward of a ``call_function`` node on operands and results of these shapes.

    ``dispatch`` is the number of ranks that send each other the tokens of their experts.
    """
    family = family_of(node)
    if family is Family.VIEW:
        return NO_WORK
    if family is Family.PRODUCT:
        return Work(products=(product_of(node, operands, results),), num_kernels=1)
    if family is Family.ATTENTION:
        flops = 4 * numel(operands[0]) * operands[1][-2]
        if is_random(node):  # not fused: scores go through memory
            moved = _PASSES_FORWARD * _itemsize(node) * num_scores(operands)
            attention = Attention(flops=flops, itemsize=_itemsize(node))
            return Work(attention=attention, bytes=moved, num_kernels=_PASSES_FORWARD // 2)
        scores = flops // 2 if _is_causal(node) else flops
        return Work(attention=Attention(flops=scores, itemsize=_itemsize(node)), num_kernels=1)
    if family is Family.EXPERTS:
        sizes = ExpertSizes.of(node, operands, dispatch)
        return Work(products=_expert_products(sizes), bytes=sizes.moved_bytes, num_kernels=12)
    read, written = _operand_bytes(node, operands), _result_bytes(node, results)
    if family is Family.EMBEDDING:
        return Work(bytes=2 * written, num_kernels=1)
    if family is Family.LOSS:  # log-softmax reads and writes the logits, the sum reads targets only
        return Work(bytes=2 * read, num_kernels=3)
    return Work(bytes=read + written, num_kernels=1)


def backward_work(
    node: fx.Node, operands: Sequence[Shape], results: Sequence[Shape], *, dispatch: int = 1
) -> Work:
    """The backward: gradients of the operands that require one; ``dispatch`` as in forward."""
    needs = [info(operand).tensor.requires_grad for operand in operands_of(node)]
    family = family_of(node)
    if not any(needs) or family is Family.VIEW:
        return NO_WORK
    if family is Family.PRODUCT:
        product = product_of(node, operands, results)
        skipped = 1 if op_name(node) in BIASED else 0
        num = sum(needs[skipped : skipped + 2])
        turned = (product.left_gradient, product.right_gradient)
        chosen = tuple(part for part, need in zip(turned, needs[skipped:], strict=False) if need)
        return Work(products=chosen, num_kernels=num)
    if family is Family.ATTENTION:  # scores again, and four products for three gradients
        forward = forward_work(node, operands, results).flops
        if is_random(node):  # scores are kept
            moved = _PASSES_BACKWARD * _itemsize(node) * num_scores(operands)
            attention = Attention(flops=2 * forward, itemsize=_itemsize(node))
            return Work(attention=attention, bytes=moved, num_kernels=_PASSES_BACKWARD // 2)
        return Work(
            attention=Attention(flops=5 * forward // 2, itemsize=_itemsize(node)), num_kernels=2
        )
    if family is Family.EXPERTS:
        sizes = ExpertSizes.of(node, operands, dispatch)
        first, second = _expert_products(sizes)
        call = Call(node)
        needed = {name for name in call.tensor_names if needs[call.indices(name)[0]]}
        upstream = needed & {"hidden", "up", "up_bias"}
        products = (
            *([second.left_gradient] if upstream else []),
            *([second.right_gradient] if "down" in needed else []),
            *([first.left_gradient] if "hidden" in needed else []),
            *([first.right_gradient] if "up" in needed else []),
        )
        return Work(products=products, bytes=2 * sizes.moved_bytes, num_kernels=24)
    read, written = _operand_bytes(node, operands), _result_bytes(node, results)
    if family is Family.EMBEDDING:
        return Work(bytes=2 * written + _bytes(node, operands, (0,)), num_kernels=2)
    if family is Family.LOSS:
        return Work(bytes=3 * read, num_kernels=2)
    # Gradients in and out; the operands again where the op is not linear in one of them alone.
    given = _bytes(node, operands, [index for index, need in enumerate(needs) if need])
    again = read if op_name(node) not in _READS_NO_OPERAND else 0
    return Work(bytes=written + given + again, num_kernels=sum(needs))


_PASSES_FORWARD, _PASSES_BACKWARD = 16, 14
"""How often attention that is not fused reads or writes a score: ``attention_with_dropout``."""


def num_scores(operands: Sequence[Shape]) -> Size:
    """Scores of attention whose first operands, query and key, have these shapes."""
    query, key = operands[:2]
    return numel(query[:-1]) * key[-2]


_READS_NO_OPERAND = LINEAR | {"expand"}


def op_flops(node: fx.Node) -> tuple[Size, Size]:
    """Forward and backward FLOPs of a node of a kind's graph, as expressions of the batch."""
    shapes = global_shapes(node)
    return forward_work(node, *shapes).flops, backward_work(node, *shapes).flops


def op_bytes(node: fx.Node) -> tuple[Size, Size]:
    """Bytes that memory-bound kernels of the node read and write, forward and backward."""
    shapes = global_shapes(node)
    return forward_work(node, *shapes).bytes, backward_work(node, *shapes).bytes


def computing_nodes(kind: BlockKind) -> tuple[fx.Node, ...]:
    """The nodes of a kind that are ops; ``getitem`` is none."""
    return tuple(
        node
        for node in kind.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    )


def global_shapes(node: fx.Node) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    """Shapes of operands and results as captured."""
    operands = tuple(info(operand).tensor.shape for operand in operands_of(node))
    return operands, tuple(tensor.shape for tensor in info(node).tensors)


def _expert_products(sizes: ExpertSizes) -> tuple[Product, Product]:
    """The two products of all experts of a rank: each expert's weights are read once."""
    first = Product(
        batch=sizes.num_experts,
        rows=sizes.rows_per_expert,
        columns=sizes.inner,
        depth=sizes.hidden,
        itemsize=sizes.itemsize,
    )
    return first, replace(first, columns=sizes.hidden, depth=sizes.features)


def _is_causal(node: fx.Node) -> bool:
    return bool(node.kwargs.get("is_causal", node.args[5] if len(node.args) > 5 else False))


def _itemsize(node: fx.Node) -> int:
    return info(operands_of(node)[0]).tensor.dtype.itemsize


def _operand_bytes(node: fx.Node, operands: Sequence[Shape]) -> Size:
    return _bytes(node, operands, range(len(operands)))


def _bytes(node: fx.Node, operands: Sequence[Shape], which: Sequence[int]) -> Size:
    nodes = operands_of(node)
    total: Size = 0
    for index in which:
        total = total + numel(operands[index]) * info(nodes[index]).tensor.dtype.itemsize
    return total


def _result_bytes(node: fx.Node, results: Sequence[Shape]) -> Size:
    total: Size = 0
    for shape, tensor in zip(results, info(node).tensors, strict=True):
        total = total + numel(shape) * tensor.dtype.itemsize
    return total
