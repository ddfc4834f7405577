"""What an op computes and moves: products of matrices, attention, bytes of memory, kernels.

Shapes may hold sympy expressions of the batch: then so does the work. A rank's share under a typing
is the work on its local shapes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.ir.families import LINEAR, Family, family_of
from autopar.ir.graph import BlockKind, Size, info
from autopar.ir.kernels import AttentionKernel
from autopar.ir.layout import operands_of
from autopar.ir.recompute import op_name
from autopar.ir.rules.call import Call
from autopar.ir.rules.random import is_random
from autopar.solver.costs.experts import ExpertSizes
from autopar.solver.costs.fusion import PLAIN, SCORE_PASSES, SCORES_WRITTEN, NodeStyle
from autopar.solver.costs.products import BIASED, Product, Shape, numel, product_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """A fused attention kernel; causal ones do half of the scores.

    Attributes:
        flops: Of all its products.
        heads: Sequences × heads.
        queries, head_dim: Rows and depth of each head's products.
    """

    kernel: AttentionKernel
    flops: Size
    heads: Size
    queries: Size
    head_dim: Size
    itemsize: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One direction of an op. ``bytes`` are those of its memory-bound kernels only.

    ``eager`` kernels are PyTorch's small ones, one for each op of the model.
    """

    products: tuple[Product, ...] = ()
    attention: Attention | None = None
    bytes: Size = 0
    num_kernels: int = 0
    eager: bool = False

    @property
    def flops(self) -> Size:
        """FLOPs of products and attention."""
        total: Size = sum((product.flops for product in self.products), 0)
        return total + self.attention.flops if self.attention else total


NO_WORK = Work()


def forward_work(
    node: fx.Node,
    operands: Sequence[Shape],
    results: Sequence[Shape],
    *,
    dispatch: int = 1,
    style: NodeStyle = PLAIN,
) -> Work:
    """The forward of a ``call_function`` node on operands and results of these shapes.

    ``dispatch`` is the number of ranks that send each other the tokens of their experts; ``style``
    says by which kernels the node is computed.
    """
    family = family_of(node)
    if family is Family.VIEW:
        return NO_WORK
    if family is Family.PRODUCT:
        return Work(products=(product_of(node, operands, results),), num_kernels=1)
    if family is Family.ATTENTION:
        if is_random(node) or style.attention in SCORES_WRITTEN:
            return _unfused_attention(node, operands, style, backward=False)
        return Work(attention=_fused_attention(node, operands, style), num_kernels=1)
    if family is Family.EXPERTS:
        sizes = ExpertSizes.of(node, operands, dispatch)
        return Work(products=_expert_products(sizes), bytes=sizes.moved_bytes, num_kernels=12)
    read, written = _operand_bytes(node, operands), _result_bytes(node, results)
    if family is Family.EMBEDDING:
        return Work(bytes=2 * written, num_kernels=1)
    if family is Family.LOSS:  # log-softmax reads and writes the logits, the sum reads targets only
        return Work(bytes=2 * read, num_kernels=3)
    if style.fused is not None:
        read = _bytes(node, operands, style.fused.reads)
        return Work(
            bytes=read + written * style.fused.writes, num_kernels=int(style.fused.is_first)
        )
    return Work(bytes=read + written, num_kernels=1, eager=style.eager)


def backward_work(
    node: fx.Node,
    operands: Sequence[Shape],
    results: Sequence[Shape],
    *,
    dispatch: int = 1,
    style: NodeStyle = PLAIN,
) -> Work:
    """The backward: gradients of the operands that require one; the rest as in forward."""
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
    if family is Family.ATTENTION:
        if is_random(node) or style.attention in SCORES_WRITTEN:
            return _unfused_attention(node, operands, style, backward=True)
        # scores again, and four products for three gradients
        attention = _fused_attention(node, operands, style)
        return Work(attention=replace(attention, flops=5 * attention.flops // 2), num_kernels=2)
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
    wanted = [index for index, need in enumerate(needs) if need]
    again = op_name(node) not in _READS_NO_OPERAND
    if style.fused is not None:
        outside = [index for index in wanted if index in style.fused.reads]
        given = _bytes(node, operands, outside)
        read = _bytes(node, operands, style.fused.reads) if not style.fused.is_linear else 0
        return Work(
            bytes=written * style.fused.writes + given + read,
            num_kernels=int(style.fused.is_first),
        )
    given = _bytes(node, operands, wanted)
    return Work(
        bytes=written + given + (read if again else 0),
        num_kernels=len(wanted),
        eager=style.eager,
    )


def weight_work(
    node: fx.Node,
    operands: Sequence[Shape],
    results: Sequence[Shape],
    weights: Sequence[int],
    *,
    dispatch: int = 1,
) -> Work:
    """The part of ``backward_work`` of a product that gives the gradients of its ``weights``, by
    their place among the operands (``ir.weight_parts``). A bias is no work of its own.
    """
    needs = [info(operand).tensor.requires_grad for operand in operands_of(node)]
    learned = [index for index in weights if needs[index]]
    if family_of(node) is Family.EXPERTS:
        sizes = ExpertSizes.of(node, operands, dispatch)
        at = {name: Call(node).indices(name)[0] for name in ("up", "down")}
        pairs = zip(("up", "down"), _expert_products(sizes), strict=True)
        chosen = tuple(product.right_gradient for name, product in pairs if at[name] in learned)
        return Work(products=chosen, num_kernels=len(chosen))
    product = product_of(node, operands, results)
    left = 1 if op_name(node) in BIASED else 0
    gradients = ((left, product.left_gradient), (left + 1, product.right_gradient))
    chosen = tuple(part for index, part in gradients if index in learned)
    return Work(products=chosen, num_kernels=len(chosen))


def num_scores(operands: Sequence[Shape]) -> Size:
    """Scores of attention whose first operands, query and key, have these shapes."""
    query, key = operands[:2]
    return numel(query[:-1]) * key[-2]


def _fused_attention(node: fx.Node, operands: Sequence[Shape], style: NodeStyle) -> Attention:
    query, key = operands[:2]
    flops = 4 * numel(query) * key[-2]
    return Attention(
        kernel=style.attention,
        flops=flops // 2 if _is_causal(node) else flops,
        heads=numel(query[:-2]),
        queries=query[-2],
        head_dim=query[-1],
        itemsize=_itemsize(node),
    )


def _unfused_attention(
    node: fx.Node, operands: Sequence[Shape], style: NodeStyle, *, backward: bool
) -> Work:
    """All scores, masked ones too, in two products (four in backward), and what reads and writes
    them in between.
    """
    query, key, value = operands[:3]
    scores = Product(
        batch=numel(query[:-2]),
        rows=query[-2],
        columns=key[-2],
        depth=query[-1],
        itemsize=_itemsize(node),
    )
    context = replace(scores, columns=value[-1], depth=key[-2])
    passes = SCORE_PASSES["random" if is_random(node) else style.attention][backward]
    products: tuple[Product, ...] = (scores, context)
    if backward:
        products = tuple(turned for p in products for turned in (p.left_gradient, p.right_gradient))
    return Work(
        products=products,
        bytes=passes * _itemsize(node) * num_scores(operands),
        num_kernels=len(products) + passes // 2,
    )


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
