"""What the rules cover of a model: its ops with their rules, and how much of its matmuls splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.ir.families import Family, family_of, op_text
from autopar.ir.graph import BATCH, BlockKind, ModelGraph, Size, evaluate, info
from autopar.ir.layout import operands_of
from autopar.ir.mesh import TENSOR_AXIS
from autopar.ir.plan import ReplicatedOp
from autopar.ir.rules.core import Option, Rule
from autopar.ir.rules.registry import rule_of, rule_or_replicated
from autopar.ir.rules.text import rule_text
from autopar.ir.typecheck import is_op, kind_options
from autopar.solver.costs.work import op_flops
from autopar.solver.hardware import Cluster
from autopar.solver.unruled import replicated_ops

_TP = 2
_BATCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OpUse:
    """One op in one of its uses.

    Attributes:
        op: The op: ``aten.linear.default``.
        count: How often it occurs in the whole model.
        rule: Its rule as text; None when it has none and is replicated.
        seconds: What replicating it costs a rank for one sequence, forward and backward; 0 for ops
            with a rule.
        sources: Lines of the model that call it, where it has no rule.
    """

    op: str
    count: int
    rule: str | None
    seconds: float
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Ops of a model and their rules.

    Attributes:
        model: Name of the model.
        uses: Ops by name; an op whose rule depends on its shapes comes once for each rule.
        matmul_flops: Forward FLOPs of matmuls (with attention and experts) for ``_BATCH``
            sequences.
        split_flops: Those of them that some rule splits over two ranks: products with a weight by
            one of its dims, attention by anything but the batch.
        unsplit: Matmuls that no rule splits: op, source line, share of all matmul FLOPs.
    """

    model: str
    uses: tuple[OpUse, ...]
    matmul_flops: int
    split_flops: int
    unsplit: tuple[tuple[str, str, float], ...]

    @property
    def without_rule(self) -> tuple[OpUse, ...]:
        """The uses that are replicated."""
        return tuple(use for use in self.uses if use.rule is None)

    @property
    def rule_coverage(self) -> float:
        """Share of the model's ops that have a rule."""
        total = sum(use.count for use in self.uses)
        return 1 - sum(use.count for use in self.without_rule) / total if total else 1.0

    @property
    def split_flops_fraction(self) -> float:
        """Share of matmul FLOPs that rules can split; 1 for a model without any."""
        return self.split_flops / self.matmul_flops if self.matmul_flops else 1.0


def coverage_of(model: ModelGraph, cluster: Cluster) -> Coverage:
    """Hold the ops of ``model`` against the rules; costs are those on ``cluster``."""
    copies = model.multiplicity()
    uses: Counter[tuple[str, str | None]] = Counter()
    total = split = 0
    unsplit: Counter[tuple[str, str]] = Counter()
    for kind in model.kinds.values():
        for node in filter(is_op, kind.graph.nodes):
            rule = rule_of(node)
            uses[op_text(node), None if rule is None else rule_text(rule)] += copies[kind.name]
        for node, flops, splits in _matmuls(kind):
            total += flops * copies[kind.name]
            if splits:
                split += flops * copies[kind.name]
            else:
                unsplit[op_text(node), info(node).source] += flops * copies[kind.name]
    costs = replicated_ops(model, cluster, sequences=1, num_micro_batches=1)
    ordered = sorted(uses.items(), key=lambda use: (use[0][0], -use[1], use[0][1] or ""))
    return Coverage(
        model=model.name,
        uses=tuple(_use(op, rule, count, costs) for (op, rule), count in ordered),
        matmul_flops=total,
        split_flops=split,
        unsplit=tuple((op, source, flops / total) for (op, source), flops in unsplit.most_common()),
    )


def _use(op: str, rule: str | None, count: int, costs: tuple[ReplicatedOp, ...]) -> OpUse:
    own = [cost for cost in costs if cost.op == op] if rule is None else []
    return OpUse(
        op=op,
        count=count,
        rule=rule,
        seconds=sum(cost.seconds for cost in own),
        sources=tuple(dict.fromkeys(cost.source for cost in own if cost.source)),
    )


def _matmuls(kind: BlockKind) -> Iterator[tuple[fx.Node, int, bool]]:
    """Matmuls of a kind with their forward FLOPs, and whether some option splits them."""
    families = (Family.PRODUCT, Family.ATTENTION, Family.EXPERTS)
    options = kind_options(kind, axis=TENSOR_AXIS, axis_size=_TP, batch=_BATCH)
    for node in filter(is_op, kind.graph.nodes):
        if family_of(node) in families:
            forward, _ = op_flops(node)
            rule = rule_or_replicated(node)
            splits = any(_splits(node, rule, option) for option in options[node.name])
            yield node, evaluate(forward, _BATCH), splits


def _splits(node: fx.Node, rule: Rule, option: Option) -> bool:
    """Whether an option divides the work on a weight by a dim of it, or attention by more than the
    batch. Tokens are what a product with a weight shares with nothing: the sequence is among them.
    """
    if option.factor is None:
        return option.helper in ("expert_slice", "expert_dispatch")
    weights = [
        dims
        for operand, dims in zip(operands_of(node), rule.operands, strict=True)
        if not any(map(_depends_on_batch, info(operand).tensor.shape))
    ]
    if family_of(node) is Family.ATTENTION or not weights:
        return not _depends_on_batch(rule.sizes[option.factor])
    return any(option.factor in dim.factors for dims in weights for dim in dims)


def _depends_on_batch(size: Size) -> bool:
    return not isinstance(size, int) and BATCH in size.free_symbols
