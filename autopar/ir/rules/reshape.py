"""The factors that two shapes of the same entries share: how a reshape splits and merges dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from autopar.ir.graph import Size
from autopar.ir.rules.core import Dim, TensorDims
from autopar.ir.rules.text import whole_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonFactors:
    """Dims of both shapes in terms of shared factors; ``private`` ones belong to one dim only."""

    source: TensorDims
    target: TensorDims
    sizes: dict[str, Size]
    private: frozenset[str]


def common_factors(source: Sequence[Size], target: Sequence[Size]) -> CommonFactors:
    """The coarsest common refinement of two shapes with equal products, outermost factors first.

    Where dims have no common divisor (``[6, 4] → [4, 6]`` after the factor 2), what remains of them
    stays whole. Dims of size 1 have no factors.
    """
    finder = _Finder(source, target)
    finder.run()
    return CommonFactors(
        source=tuple(map(Dim, finder.sides[0].factors())),
        target=tuple(map(Dim, finder.sides[1].factors())),
        sizes=finder.sizes,
        private=frozenset(finder.private),
    )


class _Side:
    """One of the shapes, read from the outermost dim inwards."""

    def __init__(self, shape: Sequence[Size]) -> None:
        self.shape = tuple(map(whole_size, shape))
        self.places = [place for place, size in enumerate(self.shape) if size != 1]
        self.found: dict[int, list[str]] = {place: [] for place in self.places}
        self.next = 0
        self.rest: Size = self.shape[self.places[0]] if self.places else 1

    @property
    def done(self) -> bool:
        return self.next == len(self.places)

    def take(self, factor: str, size: Size) -> None:
        """Give the current dim its next factor."""
        self.found[self.places[self.next]].append(factor)
        self.rest = _quotient(self.rest, size)
        if self.rest == 1:
            self.next += 1
            if not self.done:
                self.rest = self.shape[self.places[self.next]]

    def products(self) -> list[Size]:
        """Products of what is left of the current dim and the dims after it, one dim more each."""
        sizes = [self.rest, *(self.shape[place] for place in self.places[self.next + 1 :])]
        found: list[Size] = []
        product: Size = 1
        for size in sizes:
            product = whole_size(sympy.expand(product * size))
            found.append(product)
        return found

    def factors(self) -> list[tuple[str, ...]]:
        return [tuple(self.found.get(place, ())) for place in range(len(self.shape))]


class _Finder:
    def __init__(self, source: Sequence[Size], target: Sequence[Size]) -> None:
        self.sides = (_Side(source), _Side(target))
        self.sizes: dict[str, Size] = {}
        self.private: set[str] = set()

    def run(self) -> None:
        left, right = self.sides
        while not (left.done or right.done):
            common = _common_divisor(left.rest, right.rest)
            if common == 1:
                self._keep_whole()
                continue
            name = self._name(common)
            left.take(name, common)
            right.take(name, common)
        assert left.done == right.done, f"{left.shape} cannot be reshaped to {right.shape}"

    def _keep_whole(self) -> None:
        """Give the dims up to the next common boundary factors of their own."""
        products = [side.products() for side in self.sides]
        shared = next((product for product in products[0] if product in products[1]), None)
        assert shared is not None, "shapes with different products"
        for side, of_side in zip(self.sides, products, strict=True):
            for _ in range(of_side.index(shared) + 1):
                name = self._name(side.rest)
                self.private.add(name)
                side.take(name, side.rest)

    def _name(self, size: Size) -> str:
        name = f"f{len(self.sizes)}"
        self.sizes[name] = size
        return name


def _common_divisor(left: Size, right: Size) -> Size:
    """The greatest size that divides both; symbolic parts divide when they are the same."""
    number, symbol = _parts(left)
    other_number, other_symbol = _parts(right)
    divisor = math.gcd(number, other_number)
    return whole_size(divisor * symbol) if symbol == other_symbol else divisor


def _quotient(size: Size, divisor: Size) -> Size:
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor
    return whole_size(sympy.cancel(size / sympy.sympify(divisor)))


def _parts(size: Size) -> tuple[int, sympy.Expr]:
    if isinstance(size, int):
        return size, sympy.Integer(1)
    number, symbol = sympy.factor_terms(size).as_coeff_Mul()
    return (int(number), symbol) if number.is_Integer else (1, size)
