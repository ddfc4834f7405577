"""Factor rules: how an op's dims relate, and the per-axis options (typings of the op) that follow.

A rule names the *factors* of every operand and result dim, like an einsum: ``linear: b s k, n k ->
b s n``.

1. *A factor split* shards the operands and results that carry it and makes operands that lack it
   ``R``. A factor
   that no result carries is contracted: results are ``P``, and additive operands that lack it must
       be ``P``.
2. *No factor split*: all operands ``I``; all ``R``; or ``P`` on a set of operands in which the op
   is jointly linear, with the others ``R``.
3. ``extra`` options need a helper: vocabulary-split embedding and cross-entropy.

Operands without gradient know no difference between ``I`` and ``R``: they are written ``R``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.graph import Size, TensorInfo, evaluate
from autopar.ir.placement import INVARIANT, PARTIAL, REPLICATED, State, padded, shard_sizes, sharded


@dataclass(frozen=True, slots=True)
class Dim:
    """Factors of one dim, outermost first; none for a broadcast dim of size 1 (or one that must
    stay whole).

    ``blocks``: the dim is a concatenation of blocks in these proportions, each made of the factors
    (fused QKV).
    """

    factors: tuple[str, ...] = ()
    blocks: tuple[int, ...] = (1,)


TensorDims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One typing of an op on one axis. ``helper`` names the local form that it needs, if it is not
    the op itself.
    """

    operands: tuple[State, ...]
    results: tuple[State, ...]
    factor: str | None = None
    helper: str | None = None

    def __str__(self) -> str:
        left = ", ".join(map(str, self.operands))
        return f"{left} -> {', '.join(map(str, self.results))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The factor rule of one node.

    Attributes:
        operands: Dims of each tensor operand, in the order of ``operands_of(node)``.
        results: Dims of each result.
        sizes: Size of each factor (may depend on the batch).
        unsplittable: Factors that may not be split (a softmax row, norm features).
        linear: Sets of operands in which the op is jointly linear when all others are constant.
        additive: Operands that are added to a contraction (a bias): ``P`` where the contracted
            factor is split.
        helpers: Factor → name of the local form that a split of it needs.
        extra: Per-axis options beyond the factors, as a function of nothing but the rule.
        paddable: Factors that may be split unevenly, with padding (see ``placement``): the valid
            part of a result depends on the valid part of operands only, and zero gradients of
            padding stay zero. With any such factor ``extra`` options may be padded, too.
    """

    operands: tuple[TensorDims, ...]
    results: tuple[TensorDims, ...]
    sizes: Mapping[str, Size]
    unsplittable: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    additive: frozenset[int] = frozenset()
    helpers: Mapping[str, str] = field(default_factory=dict)
    extra: tuple[Option, ...] = ()
    paddable: frozenset[str] = frozenset()

    def prefix(self, dim: Dim, factor: str) -> int | None:
        """Product of the sizes of the factors outside ``factor`` in ``dim``; None when it depends
        on the batch.
        """
        product = 1
        for outer in dim.factors[: dim.factors.index(factor)]:
            size = self.sizes[outer]
            if not isinstance(size, int):
                return None
            product *= size
        return product

    def dim_size(self, dim: Dim) -> int | None:
        """The size of a dim that has factors; None when it depends on the batch."""
        size = sum(dim.blocks)
        for factor in dim.factors:
            factor_size = self.sizes[factor]
            if not isinstance(factor_size, int):
                return None
            size *= factor_size
        return size

    def shard(
        self, dim: Dim, index: int, factor: str, pattern: tuple[int, ...] = (1,)
    ) -> State | None:
        """``S(index, …)`` that gives each rank its part of ``factor`` in ``dim``.

        The factor itself is split in ``pattern``. None where its place depends on the batch.
        """
        prefix = self.prefix(dim, factor)
        if prefix is None:
            return None
        # factors inside of it scale every block alike
        blocks = tuple(
            block * part for block in dim.blocks for _ in range(prefix) for part in pattern
        )
        return sharded(index, blocks)

    def split_factors(self) -> tuple[str, ...]:
        """Factors that may be split, in the order in which they appear."""
        seen = dict.fromkeys(
            factor
            for dims in (*self.operands, *self.results)
            for dim in dims
            for factor in dim.factors
        )
        return tuple(factor for factor in seen if factor not in self.unsplittable)


BlockPatterns = Mapping[int, frozenset[tuple[int, ...]]]
"""Size of a dim → the proportions of blocks that some op of the graph sees in such a dim."""


MAX_BLOCKS = 8
"""Dims are sharded in at most this many blocks: more is never worth the copies that moves make, and
would triple the options of attention (the features of 32 heads are 32 blocks of the hidden dim).
"""


def block_patterns(rules: Sequence[Rule]) -> BlockPatterns:
    """The block structures that the rules of a graph know of: what a fused dim may be sharded by.

    A dim that has a structure hands it on to the dims that it is split into or merged with, so that
    the structures of a whole graph are found by repetition.
    """
    structured = {
        (rule.sizes[factor], rule.shard(dim, 0, factor), size): (rule, dim, factor)
        for rule in rules
        for dims in (*rule.operands, *rule.results)
        for dim in dims
        if (len(dim.factors) > 1 or len(dim.blocks) > 1) and (size := rule.dim_size(dim))
        for factor in dim.factors
        if factor not in rule.unsplittable
    }
    found: dict[int, set[tuple[int, ...]]] = {}
    known = -1
    while known < (known := sum(map(len, found.values()))):
        for (factor_size, _, size), (rule, dim, factor) in structured.items():
            assert isinstance(factor_size, int)
            for pattern in ((1,), *sorted(found.get(factor_size, ()))):
                state = rule.shard(dim, 0, factor, pattern)
                if state is not None and 1 < len(state.blocks) <= MAX_BLOCKS:
                    found.setdefault(size, set()).add(state.blocks)
    return {size: frozenset(patterns) for size, patterns in found.items()}


def options_of(
    rule: Rule,
    operands: Sequence[TensorInfo],
    results: Sequence[TensorInfo],
    *,
    axis_size: int,
    batch: int,
    patterns: BlockPatterns,
) -> tuple[Option, ...]:
    """All well-typed options of an op on an axis of ``axis_size`` ranks, at ``batch`` sequences.

    Shapes are those of one rank of the axes further out (at ``batch`` sequences *per such rank*).
    """
    found: list[Option] = []
    for factor in rule.split_factors():
        size = evaluate(rule.sizes[factor], batch)
        for pattern in ((1,), *sorted(patterns.get(size, ()))):
            uneven = shard_sizes(size, pattern, axis_size) is None
            if uneven and (factor not in rule.paddable or pattern != (1,)):
                continue
            option = _split(rule, factor, pattern)
            if option is not None and uneven:
                option = _padded(option, operands, results, axis_size)
            if option is not None and _fits(option, operands, results, axis_size, batch):
                found.append(option)
    num_operands, num_results = len(rule.operands), len(rule.results)
    found.append(Option(operands=(INVARIANT,) * num_operands, results=(INVARIANT,) * num_results))
    found.append(Option(operands=(REPLICATED,) * num_operands, results=(REPLICATED,) * num_results))
    for linear in rule.linear:
        states = tuple(PARTIAL if index in linear else REPLICATED for index in range(num_operands))
        found.append(Option(operands=states, results=(PARTIAL,) * num_results))
    for extra in rule.extra:
        option = extra
        if rule.paddable and not _fits(extra, operands, results, axis_size, batch):
            option = _padded(extra, operands, results, axis_size)
        if option is not None and _fits(option, operands, results, axis_size, batch):
            found.append(option)
    normal = (
        Option(
            operands=tuple(map(normal_state, option.operands, operands)),
            results=tuple(map(normal_state, option.results, results)),
            factor=option.factor,
            helper=option.helper,
        )
        for option in found
    )
    unique: dict[tuple[tuple[State, ...], tuple[State, ...]], Option] = {}
    for option in normal:
        unique.setdefault((option.operands, option.results), option)
    return tuple(unique.values())


def normal_state(state: State, tensor: TensorInfo) -> State:
    """``state``, with ``I`` written ``R`` for tensors without gradient."""
    return REPLICATED if state == INVARIANT and not tensor.requires_grad else state


def _split(rule: Rule, factor: str, pattern: tuple[int, ...]) -> Option | None:
    """The option that splits ``factor``, each of its dims in ``pattern``; None where a dim cannot
    be split so.
    """
    contracted = not any(factor in dim.factors for dims in rule.results for dim in dims)
    operands: list[State] = []
    for index, dims in enumerate(rule.operands):
        lacking = PARTIAL if contracted and index in rule.additive else REPLICATED
        state = _state_of(rule, dims, factor, pattern, lacking)
        if state is None:
            return None
        operands.append(state)
    results: list[State] = []
    for dims in rule.results:
        state = _state_of(rule, dims, factor, pattern, PARTIAL if contracted else REPLICATED)
        # a result that lacks a factor which another result carries would be a partial sum of
        # another kind
        if state is None or (state == REPLICATED and not contracted):
            return None
        results.append(state)
    return Option(
        operands=tuple(operands),
        results=tuple(results),
        factor=factor,
        helper=rule.helpers.get(factor),
    )


PADDED_FROM = 16
"""Only dims with at least so many elements for each rank are padded: little is wasted."""


def _padded(
    option: Option, operands: Sequence[TensorInfo], results: Sequence[TensorInfo], axis_size: int
) -> Option | None:
    """``option`` with padded shards; None where a dim is too small, grows, or has blocks."""

    def pad(state: State, tensor: TensorInfo) -> State | None:
        if not state.is_sharded:
            return state
        size = tensor.shape[state.dim]
        if not isinstance(size, int) or len(state.blocks) > 1 or size < PADDED_FROM * axis_size:
            return None
        return padded(state.dim, size)

    taken = [pad(state, tensor) for state, tensor in zip(option.operands, operands, strict=True)]
    given = [pad(state, tensor) for state, tensor in zip(option.results, results, strict=True)]
    states, made = [s for s in taken if s is not None], [s for s in given if s is not None]
    if len(states) < len(taken) or len(made) < len(given):
        return None
    return Option(
        operands=tuple(states), results=tuple(made), factor=option.factor, helper=option.helper
    )


def _state_of(
    rule: Rule, dims: TensorDims, factor: str, pattern: tuple[int, ...], lacking: State
) -> State | None:
    carrying = [index for index, dim in enumerate(dims) if factor in dim.factors]
    if not carrying:
        return lacking
    if len(carrying) > 1:
        return None  # a diagonal
    return rule.shard(dims[carrying[0]], carrying[0], factor, pattern)


def _fits(
    option: Option,
    operands: Sequence[TensorInfo],
    results: Sequence[TensorInfo],
    axis_size: int,
    batch: int,
) -> bool:
    pairs = zip((*option.operands, *option.results), (*operands, *results), strict=True)
    return all(
        not state.is_sharded
        or (
            len(state.blocks) <= MAX_BLOCKS
            and state.shares(evaluate(tensor.shape[state.dim], batch), axis_size) is not None
        )
        for state, tensor in pairs
    )
