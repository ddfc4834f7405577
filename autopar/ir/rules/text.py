"""Dims written as text, like einsum: ``b.. s (h d)``.

==============  ==================================================================================
``k``           a dim that is the factor ``k``
``b..``         any number of dims, aligned from the right and broadcast where one has size 1
``(h d)``       one dim that is the product of factors, outermost first
``!k``          ``k`` may not be split (anywhere in the rule)
``_``, ``_..``  a dim, or any number of them, that stays whole
``()``          no dim: a scalar (nothing at all means the same)
==============  ==================================================================================

A dim of size 1 whose factor is larger elsewhere is broadcast: it carries no factor.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import sympy

from autopar.ir.errors import InputError
from autopar.ir.graph import Size, TensorInfo
from autopar.ir.rules.core import Dim, Option, Rule, TensorDims


@dataclass(frozen=True, slots=True)
class Term:
    """One dim of a text; with ``repeated``, any number of dims; without factors, a whole dim."""

    factors: tuple[str, ...]
    repeated: bool = False
    unsplittable: frozenset[str] = frozenset()


Terms = tuple[Term, ...]

_TOKEN = re.compile(r"\s*(\([^()]*\)|[^\s()]+)")
_FACTOR = re.compile(r"(!?)([A-Za-z]\w*)")


@functools.lru_cache(maxsize=1024)
def parse_dims(text: str) -> Terms:
    """The dims of one tensor.

    Raises:
        InputError: If ``text`` is malformed; the message quotes the token.
    """
    terms: list[Term] = []
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            raise InputError(f"unbalanced parenthesis in the dims {text!r}")
        if match[1] != "()":
            terms.append(_term(match[1], text))
        position = match.end()
    if sum(term.repeated for term in terms) > 1:
        raise InputError(f"more than one '..' in the dims {text!r}")
    return tuple(terms)


def _term(token: str, text: str) -> Term:
    if token in ("_", "_.."):
        return Term((), token != "_")
    repeated = token.endswith("..")
    inner = token[1:-1].split() if token.startswith("(") else [token.removesuffix("..")]
    matches = [_FACTOR.fullmatch(part) for part in inner]
    found = [match for match in matches if match is not None]
    if not found or len(found) != len(matches):
        raise InputError(
            f"cannot read {token!r} in the dims {text!r}",
            hint="write names like k, b.., (h d), !k or _",
        )
    factors = tuple(match[2] for match in found)
    return Term(factors, repeated, frozenset(match[2] for match in found if match[1]))


@dataclass(slots=True)
class SizeTable:
    """Sizes of the factors of a rule, found by holding texts against shapes."""

    sizes: dict[str, Size] = field(default_factory=dict)
    unsplittable: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        pairs: Iterable[tuple[Terms, Sequence[Size]]],
        known: Mapping[str, Size] | None = None,
    ) -> SizeTable:
        """Sizes from all tensors of a rule, beside those that are ``known``.

        Raises:
            InputError: If a size is contradictory or cannot be found.
        """
        table = cls(dict(known or {}))
        products: list[tuple[Dim, Size]] = []
        for terms, shape in pairs:
            dims = _unroll(terms, len(shape))
            marked = frozenset[str]().union(*(term.unsplittable for term in terms))
            for dim, size in zip(dims, shape, strict=True):
                table.unsplittable |= {
                    factor for factor in dim.factors if factor.partition("..")[0] in marked
                }
                if len(dim.factors) == 1:
                    table._learn(dim.factors[0], size)
                elif dim.factors:
                    products.append((dim, size))
        for dim, size in sorted(products, key=lambda product: product[1] == 1):
            table._learn_product(dim, size)
        return table

    def _learn(self, factor: str, size: Size) -> None:
        known = self.sizes.get(factor, 1)
        if known == 1:
            self.sizes[factor] = whole_size(size)
        elif size not in (1, known):
            raise InputError(f"factor {factor!r} has the sizes {known} and {size}")

    def _learn_product(self, dim: Dim, size: Size) -> None:
        unknown = [factor for factor in dim.factors if factor not in self.sizes]
        known: Size = 1
        for factor in dim.factors:
            known = known * self.sizes.get(factor, 1)
        if size == 1:  # the factors are all 1, or the dim is broadcast
            self.sizes.update(dict.fromkeys(unknown, 1))
            return
        if len(unknown) > 1:
            raise InputError(f"the sizes of {', '.join(unknown)} cannot be told from their product")
        if unknown:
            quotient = whole_size(sympy.cancel(size / sympy.sympify(known)))
            if isinstance(size, int) and not isinstance(quotient, int):
                raise InputError(
                    f"dim ({' '.join(dim.factors)}) has size {size}, no multiple of {known}"
                )
            self.sizes[unknown[0]] = quotient
        elif whole_size(known) != whole_size(size):
            raise InputError(f"dim ({' '.join(dim.factors)}) has size {size}, not {known}")


def match_dims(terms: Terms, shape: Sequence[Size], table: SizeTable) -> TensorDims:
    """The dims of a tensor of ``shape``; factors of size 1 and broadcast ones are dropped."""
    dims: list[Dim] = []
    for dim, size in zip(_unroll(terms, len(shape)), shape, strict=True):
        kept = () if size == 1 else tuple(name for name in dim.factors if table.sizes[name] != 1)
        dims.append(Dim(kept))
    return tuple(dims)


@functools.lru_cache(maxsize=4096)
def _unroll(terms: Terms, num_dims: int) -> TensorDims:
    """One ``Dim`` for each dim of a tensor; ``b..`` is ``b..1 b..0``, numbered from the right."""
    repeats = num_dims - sum(not term.repeated for term in terms)
    if repeats < 0 or (repeats > 0 and not any(term.repeated for term in terms)):
        written = " ".join("(" + " ".join(term.factors) + ")" for term in terms)
        raise InputError(f"a tensor of {num_dims} dims does not fit the dims {written or '(none)'}")
    dims: list[Dim] = []
    for term in terms:
        if term.repeated and not term.factors:
            dims.extend([Dim()] * repeats)
        elif term.repeated:
            dims.extend(Dim((f"{term.factors[0]}..{index}",)) for index in reversed(range(repeats)))
        else:
            dims.append(Dim(term.factors))
    return tuple(dims)


def whole_size(size: Size) -> Size:
    """``size`` as an int where it is a number."""
    if isinstance(size, int):
        return size
    return int(size) if size.is_Integer else size


def parse_rule(
    text: str,
    operands: Sequence[TensorInfo],
    results: Sequence[TensorInfo],
    *,
    linear: Iterable[Iterable[int]] = (),
    additive: Iterable[int] = (),
    helpers: dict[str, str] | None = None,
    extra: Sequence[Option] = (),
) -> Rule:
    """The rule ``"b.. k, n k -> b.. n"`` for tensors of these shapes.

    Args:
        text: Dims of the operands, ``->``, dims of the results, each separated by commas.
        operands: The tensor operands, in the order of ``operands_of``.
        results: The results.
        linear: See ``Rule``.
        additive: See ``Rule``.
        helpers: See ``Rule``.
        extra: See ``Rule``.

    Raises:
        InputError: If ``text`` is malformed or does not fit the shapes.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise InputError(f"the rule {text!r} has no '->'")
    pairs = (*_sided(text, left, operands, "operands"), *_sided(text, right, results, "results"))
    table = SizeTable.of(pairs)
    dims = tuple(match_dims(terms, shape, table) for terms, shape in pairs)
    return Rule(
        operands=dims[: len(operands)],
        results=dims[len(operands) :],
        sizes=table.sizes,
        unsplittable=frozenset(table.unsplittable),
        linear=tuple(map(frozenset, linear)),
        additive=frozenset(additive),
        helpers=helpers or {},
        extra=tuple(extra),
    )


def _sided(
    text: str, side: str, tensors: Sequence[TensorInfo], what: str
) -> list[tuple[Terms, tuple[Size, ...]]]:
    """The dims of one side of a rule, each with the shape that it describes."""
    texts = side.split(",") if tensors or side.strip() else []
    if len(texts) != len(tensors):
        raise InputError(f"the rule {text!r} has {len(texts)} {what}, the op has {len(tensors)}")
    return [(parse_dims(part), tensor.shape) for part, tensor in zip(texts, tensors, strict=True)]


def rule_text(rule: Rule) -> str:
    """A rule in the notation of this module; a dim of several blocks is ``(4:1:1 h)``."""
    sides = (rule.operands, rule.results)
    left, right = (
        ", ".join(" ".join(_dim_text(dim, rule) for dim in dims) or "()" for dims in side)
        for side in sides
    )
    return f"{left} -> {right}".strip()


def _dim_text(dim: Dim, rule: Rule) -> str:
    names = [
        ("!" if factor in rule.unsplittable else "") + factor.replace("..", "")
        for factor in dim.factors
    ]
    if not names:
        return "_"
    if len(dim.blocks) > 1:
        names.insert(0, ":".join(map(str, dim.blocks)))
    return names[0] if len(names) == 1 else f"({' '.join(names)})"
