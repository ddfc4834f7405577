"""``prove_rule``: hold a registered rule against the op itself, shard by shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.ir.errors import InputError, RuleError
from autopar.ir.rules.custom import OpLike, find_op
from autopar.ir.rules.registry import rule_of
from autopar.testing.prove import Sample, prove, sample_node

SizeOf = Callable[[str], int]
"""Gives each name of a dim a size, the same one for the same name."""


def prove_rule(
    op: OpLike,
    *args: Any,
    axis_sizes: tuple[int, ...] = (2, 3, 4),
    num_examples: int = 30,
    **kwargs: Any,
) -> int:
    """Run every split that the rule of ``op`` allows, and compare with the op itself.

    Values and gradients of all operands have to be those of the op. Floating tensors are taken in
    float64 and have gradients.

    Args:
        op: An op with a rule: its name ``"namespace::name"``, or itself.
        args: Arguments to call it with; or one function that makes them from sizes, which are
            drawn at random (this needs ``hypothesis``): ``lambda size: (torch.randn(size("b"),
            size("k")), torch.randn(size("k"), size("n")))``.
        axis_sizes: Numbers of ranks to split over.
        num_examples: How many examples are drawn for each of them.
        kwargs: Further arguments of the op.

    Returns:
        The number of options that were tried; those without any split are among them.

    Raises:
        RuleError: The rule is wrong; the message names the op, the factor that was split, the axis
            with its ranks, and what differs.
        InputError: The op does not exist or has no rule.
    """
    target = find_op(op)
    if target is None:
        raise InputError(f"there is no op {op!r}", hint="import the module that defines it")
    if len(args) == 1 and not isinstance(args[0], Tensor) and callable(args[0]):
        make: Any = args[0]
        return _prove_drawn(target, make, kwargs, axis_sizes, num_examples)
    return sum(_prove_one(target, args, kwargs, size) for size in axis_sizes)


def _prove_one(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], axis_size: int
) -> int:
    sample = Sample(
        target=target,
        args=tuple(map(_in_float64, args)),
        kwargs={name: _in_float64(value) for name, value in kwargs.items()},
    )
    node = sample_node(sample).node
    if rule_of(node) is None:
        raise InputError(
            "there is no rule to prove", where=str(target), hint="autopar.register_rule"
        )
    try:
        return prove(sample, axis_size)
    except AssertionError as error:
        raise RuleError(
            f"the rule is wrong: {error}",
            hint="write a factor that may not be split as !k; one that no result carries has to be "
            "summed over; name in `linear` and `additive` only what is so",
        ) from error


def _prove_drawn(
    target: Callable[..., Any],
    make: Callable[[SizeOf], tuple[Any, ...]],
    kwargs: dict[str, Any],
    axis_sizes: tuple[int, ...],
    num_examples: int,
) -> int:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    tried = 0

    @settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
    )
    @given(st.sampled_from(axis_sizes), st.data())
    def every_option(axis_size: int, data: st.DataObject) -> None:
        nonlocal tried
        sizes: dict[str, int] = {}

        def size_of(name: str) -> int:
            if name not in sizes:
                multiples = st.integers(1, 2).map(lambda times: times * axis_size)
                sizes[name] = data.draw(multiples | st.integers(1, 3), label=name)
            return sizes[name]

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            args = make(size_of)
        tried += _prove_one(target, tuple(args), kwargs, axis_size)

    every_option()
    return tried


def _in_float64(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double()
    if isinstance(value, list | tuple):
        return type(value)(map(_in_float64, value))
    return value
