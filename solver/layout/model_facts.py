"""What of a model depends on no axis and no batch, computed once: rules, classes, matrices."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.ir.graph import ModelGraph, Role, info
from autopar.ir.kernels import KernelSet
from autopar.ir.layout import operands_of
from autopar.ir.loss_region import LossKind, NoLossRegion, loss_kind, most_in_chunks
from autopar.ir.placement import sharded
from autopar.ir.plan import RecomputeName
from autopar.ir.recompute import recomputed_blocks, recomputed_nodes
from autopar.ir.rules.attention import CAUSAL_HELPER
from autopar.ir.typecheck import KindRules, kind_rules
from autopar.ir.weight_parts import weight_operands
from autopar.solver.costs.fusion import NodeStyle, node_styles
from autopar.solver.costs.saved import replayed_nodes
from autopar.solver.layout.classes import Classes, state_classes
from autopar.solver.layout.frame import Frame
from autopar.solver.layout.price import Priced
from autopar.solver.layout.state import AxisRule


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of a model.

    Attributes:
        rules: Rules of the ops of each kind.
        classes: Which placeholders and block results must agree.
        matrices: Classes of the parameters with two dims or more. A tensor axis shards them:
            matrices that all its ranks hold whole, each rank with its own tokens, are a plan for a
            context axis.
        uses: How many nodes read the placeholders of each class.
        experts: Classes of the weights of routed experts, of which dim 0 are the experts.
        num_experts: What an expert axis has to divide; 0 without routed experts.
        weights: For each kind, the ops whose weights can have their gradients later, and which of
            their operands these are (``ir.weight_parts``); none of the kind that makes the loss.
        positions: Sizes of the dims along which causal attention can be split.
        loss: The kind that makes the loss, or why it cannot be computed in chunks.
        frames: Choices on an axis that were made already, by what they depend on.
        priced: What ops and moves cost that were priced already, by what that depends on.
    """

    model: ModelGraph
    rules: Mapping[str, KindRules]
    classes: Classes
    matrices: frozenset[int]
    uses: Mapping[int, int]
    experts: frozenset[int]
    num_experts: int
    weights: Mapping[str, Mapping[fx.Node, tuple[int, ...]]]
    positions: frozenset[int]
    loss: LossKind | NoLossRegion
    frames: dict[Hashable, tuple[Frame, object]] = field(default_factory=dict, repr=False)
    priced: dict[Hashable, Priced] = field(default_factory=dict, repr=False)
    _numbers: dict[Hashable, int] = field(default_factory=dict, repr=False)
    _repeated: dict[RecomputeName, NDArray[np.float64]] = field(default_factory=dict, repr=False)
    _in_chunks: dict[int, frozenset[str]] = field(default_factory=dict, repr=False)
    _styles: dict[KernelSet, Mapping[fx.Node, NodeStyle]] = field(default_factory=dict, repr=False)
    _again: dict[tuple[RecomputeName, KernelSet], frozenset[fx.Node]] = field(
        default_factory=dict, repr=False
    )

    def number_of(self, thing: Hashable) -> int:
        """The same number for what is equal."""
        return self._numbers.setdefault(thing, len(self._numbers))

    @property
    def loss_block(self) -> int:
        """The block that makes the loss."""
        return self.model.producer(self.model.loss)[0]

    def most_in_chunks(self, num_chunks: int) -> frozenset[str]:
        """Nodes of the kind that makes the loss that may run in so many chunks, under any layout;
        none where nothing can.
        """
        if num_chunks not in self._in_chunks:
            found: frozenset[str] = frozenset()
            if isinstance(self.loss, LossKind):
                most = most_in_chunks(self.loss, self.rules[self.loss.kind.name], num_chunks)
                found = most if isinstance(most, frozenset) else found
            self._in_chunks[num_chunks] = found
        return self._in_chunks[num_chunks]

    def styles(self, kernels: KernelSet) -> Mapping[fx.Node, NodeStyle]:
        """The style of every op under ``kernels``; the same object for the same question."""
        if kernels not in self._styles:
            self._styles[kernels] = node_styles(self.model.kinds.values(), kernels)
        return self._styles[kernels]

    def computed_again(self, recompute: RecomputeName, kernels: KernelSet) -> frozenset[fx.Node]:
        """Nodes that ``recompute`` computes again one by one in backward, in all kinds but the one
        that makes the loss; found once.
        """
        if (recompute, kernels) not in self._again:
            styles, last = self.styles(kernels), self.model.blocks[self.loss_block].kind
            graphs = [kind.graph for kind in self.model.kinds.values() if kind.name != last]
            self._again[recompute, kernels] = frozenset().union(
                *(
                    replayed_nodes(
                        graph, recomputed_nodes(graph, recompute, kernels.attention), styles
                    )
                    for graph in graphs
                )
            )
        return self._again[recompute, kernels]

    def repeated_blocks(self, recompute: RecomputeName) -> NDArray[np.float64]:
        """1 for blocks that ``recompute`` repeats as a whole, 0 for others; read-only."""
        if recompute not in self._repeated:
            repeated = recomputed_blocks(self.model, recompute)
            found = np.array([float(block.index in repeated) for block in self.model.blocks])
            found.flags.writeable = False
            self._repeated[recompute] = found
        return self._repeated[recompute]

    def rules_on(self, axis: AxisRule, kind: str, num_ranks: int) -> KindRules:
        """The rules of a kind on an axis.

        A context axis also knows positions in stripes, so that the ranks share causal scores.
        """
        rules = self.rules[kind]
        if not axis.shards_activations:
            return rules
        patterns = dict(rules.patterns)
        for size in self.positions:
            stripes = next((n for n in _STRIPES if size % (n * num_ranks) == 0), 1)
            if stripes > 1:
                patterns[size] = patterns.get(size, frozenset()) | {(1,) * stripes}
        return KindRules(rules=rules.rules, patterns=patterns)


_STRIPES = (8, 4, 2)
"""Numbers of stripes, the best balanced first; more would cut attention into small calls."""


def model_facts(model: ModelGraph) -> ModelFacts:
    """The facts of ``model``."""
    classes = state_classes(model)
    matrices: set[int] = set()
    uses: dict[int, int] = {}
    rules = {name: kind_rules(kind) for name, kind in model.kinds.items()}
    for name, kind in model.kinds.items():
        for index, (node, role) in enumerate(zip(kind.placeholders, kind.roles, strict=True)):
            number = classes.of[name, "in", index]
            uses[number] = uses.get(number, 0) + len(node.users)
            if role is Role.PARAMETER and len(info(node).tensor.shape) > 1:
                matrices.add(number)
    experts = _expert_weights(model, rules)
    return ModelFacts(
        model=model,
        rules=rules,
        classes=classes,
        matrices=frozenset(matrices),
        uses=uses,
        experts=frozenset(
            classes.of[name, "in", index] for name, index in experts if index is not None
        ),
        num_experts=math.gcd(*experts.values()),
        weights=_later_weights(model),
        positions=_causal_positions(rules),
        loss=loss_kind(model),
    )


def _later_weights(model: ModelGraph) -> dict[str, Mapping[fx.Node, tuple[int, ...]]]:
    last = model.blocks[model.producer(model.loss)[0]].kind
    found: dict[str, Mapping[fx.Node, tuple[int, ...]]] = {last: {}}
    for name, kind in model.kinds.items():
        pairs = zip(kind.placeholders, kind.roles, strict=True)
        parameters = [node for node, role in pairs if role is Role.PARAMETER]
        if name != last:
            found[name] = weight_operands(kind.graph, parameters)
    return found


def _expert_weights(
    model: ModelGraph, rules: Mapping[str, KindRules]
) -> dict[tuple[str, int | None], int]:
    """The number of experts of each placeholder (kind, index) that routed experts read as weights.

    What they read through other ops is at index None.
    """
    found: dict[tuple[str, int | None], int] = {}
    for name, kind in model.kinds.items():
        placeholders = {node: index for index, node in enumerate(kind.placeholders)}
        for node in kind.graph.nodes:
            rule = rules[name].rules.get(node.name)
            options = rule.extra if rule else ()
            dispatch = next((o for o in options if o.helper == "expert_dispatch"), None)
            if dispatch is None:
                continue
            for operand, state in zip(operands_of(node), dispatch.operands, strict=True):
                size = info(operand).tensor.shape[0]
                if state == sharded(0) and isinstance(size, int):
                    found[name, placeholders.get(operand)] = size
    return found


def _causal_positions(rules: Mapping[str, KindRules]) -> frozenset[int]:
    return frozenset(
        size
        for of_kind in rules.values()
        for rule in of_kind.rules.values()
        for factor, helper in rule.helpers.items()
        if helper == CAUSAL_HELPER and isinstance(size := rule.sizes[factor], int)
    )
