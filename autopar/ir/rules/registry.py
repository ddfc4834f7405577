"""Which rule an op has. Families register functions ``(node) -> Rule``; others are replicated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import fx
from torch._ops import OpOverload

from autopar.ir.graph import TensorInfo, info
from autopar.ir.layout import operands_of
from autopar.ir.rules.core import Dim, Rule, TensorDims

RuleFunction = Callable[[fx.Node], Rule | None]
"""Makes the rule of a node; None when this use of the op has none."""

_Function = TypeVar("_Function", bound=RuleFunction)

_RULES: dict[object, RuleFunction] = {}
_TAGGED: dict[torch.Tag, RuleFunction] = {}


def register(*targets: object) -> Callable[[_Function], _Function]:
    """Make the decorated function the rule of ``targets``.

    A target is an overload of an op, an overload packet (all its overloads), the name of an op as
    ``"namespace::name"`` (all its overloads, whether or not it is defined yet), or a function of
    ``autopar.ir.functional``. A later registration replaces an earlier one.
    """

    def decorate(function: _Function) -> _Function:
        for target in targets:
            _RULES[target] = function
        return function

    return decorate


def register_tagged(tag: torch.Tag) -> Callable[[_Function], _Function]:
    """Make the decorated function the rule of all ops with ``tag`` that have no other one, write
    into no argument and draw no random numbers.
    """

    def decorate(function: _Function) -> _Function:
        _TAGGED[tag] = function
        return function

    return decorate


def unregister(*targets: object) -> None:
    """Forget what was registered for exactly these ``targets``."""
    for target in targets:
        _RULES.pop(target, None)


def registered() -> Mapping[object, RuleFunction]:
    """All targets that have a rule, each with the function that makes it."""
    return dict(_RULES)


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of a ``call_function`` node, or None when its op has none."""
    function = _find(node.target)
    return None if function is None else function(node)


def has_rule(node: fx.Node) -> bool:
    """True when ``node`` can be typed otherwise than replicated or invariant."""
    return rule_of(node) is not None


def rule_or_replicated(node: fx.Node) -> Rule:
    """The rule of ``node``; without one all its operands are ``I``, or all are ``R``."""
    return rule_of(node) or replicated_rule(node)


def replicated_rule(node: fx.Node) -> Rule:
    """The rule that every op obeys: no factors, and linear in nothing."""
    return Rule(
        operands=tuple(_whole(info(operand).tensor) for operand in operands_of(node)),
        results=tuple(_whole(tensor) for tensor in info(node).tensors),
        sizes={},
    )


def _whole(tensor: TensorInfo) -> TensorDims:
    return (Dim(),) * len(tensor.shape)


def _find(target: object) -> RuleFunction | None:
    found = _RULES.get(target)
    if found is not None or not isinstance(target, OpOverload):
        return found
    schema = target._schema  # pyright: ignore[reportPrivateUsage]
    found = _RULES.get(target.overloadpacket) or _RULES.get(schema.name)
    if found is not None or schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return found
    return next((_TAGGED[tag] for tag in target.tags if tag in _TAGGED), None)
