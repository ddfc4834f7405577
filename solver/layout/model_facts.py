"""What of a model depends on no axis and no batch, computed once: rules, classes, matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.graph import ModelGraph, Role, info
from autopar.ir.typecheck import KindRules, kind_rules
from autopar.solver.layout.classes import Classes, state_classes


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
    """

    model: ModelGraph
    rules: Mapping[str, KindRules]
    classes: Classes
    matrices: frozenset[int]
    uses: Mapping[int, int]


def model_facts(model: ModelGraph) -> ModelFacts:
    """The facts of ``model``."""
    classes = state_classes(model)
    matrices: set[int] = set()
    uses: dict[int, int] = {}
    for name, kind in model.kinds.items():
        for index, (node, role) in enumerate(zip(kind.placeholders, kind.roles, strict=True)):
            number = classes.of[name, "in", index]
            uses[number] = uses.get(number, 0) + len(node.users)
            if role is Role.PARAMETER and len(info(node).tensor.shape) > 1:
                matrices.add(number)
    return ModelFacts(
        model=model,
        rules={name: kind_rules(kind) for name, kind in model.kinds.items()},
        classes=classes,
        matrices=frozenset(matrices),
        uses=uses,
    )
