"""Rules of a user's own ops, written as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from autopar.ir.errors import InputError
from autopar.ir.graph import info
from autopar.ir.rules.call import Call
from autopar.ir.rules.core import Rule
from autopar.ir.rules.registry import register
from autopar.ir.rules.text import parse_dims

OpLike = str | OpOverload | OpOverloadPacket | Callable[..., Any]
"""An op by its name ``"namespace::name"``, or itself, or a function that graphs call."""


def register_rule(
    op: OpLike,
    rule: str,
    *,
    linear: Iterable[str | Sequence[str]] = (),
    additive: Iterable[str] = (),
) -> None:
    """Say how the dims of an op relate, so that it can be split: ``"b n k, k m -> b n m"``.

    Dims of the tensor arguments in the order of the op's schema, ``->``, dims of the results; see
    ``docs/guides/custom-ops.md`` for the notation. A rule replaces an earlier one of the same op.
    ``prove_rule`` tells whether it is right.

    Args:
        op: An op, by name (it may be defined later) or itself: what ``torch.library.custom_op``
            makes, or one of ``torch.ops``.
        rule: Its rule.
        linear: Arguments in which the op is linear while all others are constant, each a name or
            several in which it is jointly linear: sums over ranks may pass through them.
        additive: Arguments that are added to a contraction (a bias).

    Raises:
        InputError: The rule cannot be read, or does not fit the schema of the op.
    """
    if not isinstance(rule, str):
        raise InputError(
            f"a rule is a text, not {rule!r}",
            where=_name(op),
            hint='write "b n k, k m -> b n m"',
        )
    sets = tuple((names,) if isinstance(names, str) else tuple(names) for names in linear)
    written = _Written.of(op, rule, sets, tuple(additive))
    _check_schema(op, written)
    register(_target(op))(written.rule_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    text: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    linear: tuple[tuple[str, ...], ...]
    additive: tuple[str, ...]

    @classmethod
    def of(
        cls, op: OpLike, text: str, linear: tuple[tuple[str, ...], ...], additive: tuple[str, ...]
    ) -> _Written:
        left, arrow, right = text.partition("->")
        if not arrow:
            raise InputError(
                f"the rule {text!r} has no '->'",
                where=_name(op),
                hint="write dims of the operands -> dims of the results",
            )
        sides = tuple(tuple(part.strip() for part in side.split(",")) for side in (left, right))
        for part in (*sides[0], *sides[1]):
            parse_dims(part)
        operands = sides[0] if left.strip() else ()
        return cls(text=text, operands=operands, results=sides[1], linear=linear, additive=additive)

    def rule_of(self, node: fx.Node) -> Rule:
        """The rule of a call: texts go to tensor arguments in the order of the schema."""
        call = Call(node)
        names = _tensor_names(node.target) or call.tensor_names
        if len(names) != len(self.operands) or len(call.results) != len(self.results):
            raise InputError(
                f"the rule {self.text!r} has {len(self.operands)} operands and "
                f"{len(self.results)} results, the op {len(names)} and {len(call.results)}",
                where=f"{node.target} {info(node).source}".strip(),
            )
        try:
            return call.text_rule(
                dict(zip(names, self.operands, strict=True)),
                self.results,
                linear=self.linear,
                additive=self.additive,
            )
        except InputError as error:
            shapes = ", ".join(str(list(operand.shape)) for operand in call.operands)
            raise InputError(
                f"the rule {self.text!r} does not fit operands of the shapes {shapes}: "
                f"{error.what}",
                where=f"{node.target} {info(node).source}".strip(),
                hint="register a rule that fits, or none: then the op is replicated",
            ) from error


def _check_schema(op: OpLike, written: _Written) -> None:
    target = find_op(op)
    names = _tensor_names(target)
    if not names:
        return
    said = (name for group in (*written.linear, written.additive) for name in group)
    unknown = [name for name in said if name not in names]
    if unknown:
        raise InputError(
            f"the op has no tensor argument {unknown[0]!r}",
            where=_name(op),
            hint=f"one of {', '.join(names)}",
        )
    if len(names) != len(written.operands):
        raise InputError(
            f"the rule {written.text!r} has {len(written.operands)} operands, the op has "
            f"{len(names)}: {', '.join(names)}",
            where=_name(op),
            hint="give dims of every tensor argument, also of those that may be left out",
        )


def find_op(op: OpLike) -> Callable[..., Any] | None:
    """The overload that ``op`` means, the default one of several; None for a name that is not
    defined yet.

    Raises:
        InputError: It is no name of an op.
    """
    found: Any = _target(op)
    if isinstance(found, str):
        namespace, _, name = found.partition("::")
        found = getattr(getattr(torch.ops, namespace), name, None)
    if isinstance(found, OpOverloadPacket):
        overloads = found.overloads()
        found = getattr(found, "default" if "default" in overloads else overloads[0])
    return found if callable(found) else None


def _target(op: OpLike) -> object:
    """What rules are registered for: a name, an overload, a packet or a function."""
    if isinstance(op, CustomOpDef):
        return op._qualname  # pyright: ignore[reportPrivateUsage]
    if isinstance(op, str):
        namespace, _, name = op.partition("::")
        if not (namespace.isidentifier() and name.isidentifier()):
            raise InputError(f"{op!r} is no name of an op", hint='write "namespace::name"')
    elif not callable(op):
        raise InputError(f"{op!r} is no op", hint='give the op itself, or "namespace::name"')
    return op


def _tensor_names(target: object) -> tuple[str, ...]:
    """Names of the tensor arguments of an op's schema; none for other functions."""
    if not isinstance(target, OpOverload):
        return ()
    arguments = target._schema.arguments  # pyright: ignore[reportPrivateUsage]
    return tuple(argument.name for argument in arguments if "Tensor" in str(argument.type))


def _name(op: OpLike) -> str:
    return op if isinstance(op, str) else str(op)
