"""Exact minimum of a sum of tables over few variables each, by eliminating one variable after the
other (min-sum bucket elimination).

A table is a cost for each combination of values of its variables. To eliminate a variable is to
add up all tables that have it, and to keep their minimum over it as a new table of the others. The
graph of a block is a chain with few side branches, so that the new tables stay small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Scope = tuple[int, ...]
"""The variables of a table, in ascending order: its dims."""

LARGEST = 4_000_000
"""Cells of the largest table that is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Elimination of ``variable``: the sum of ``tables`` (each seen in a shape of its own, with
    dims of 1) over ``rest`` and ``variable``, and its minimum along dim ``dim``.
    """

    variable: int
    tables: tuple[tuple[int, tuple[int, ...]], ...]
    dim: int
    rest: Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Elimination:
    """The steps for tables of given scopes; the table that step i makes has number ``num`` + i."""

    num: int
    num_variables: int
    steps: tuple[Step, ...]


def plan_elimination(domains: Sequence[int], scopes: Sequence[Scope]) -> Elimination | None:
    """An order of elimination, the smallest new table first; None where tables get too large.

    Args:
        domains: Number of values of each variable, at least 1.
        scopes: Variables of each table.
    """
    tables: dict[int, Scope] = dict(enumerate(scopes))
    holding: list[set[int]] = [set() for _ in domains]
    for number, scope in tables.items():
        for variable in scope:
            holding[variable].add(number)

    def union(variable: int) -> Scope:
        found = {variable}
        for number in holding[variable]:
            found.update(tables[number])
        return tuple(sorted(found))

    def cells(variable: int) -> int:
        return math.prod(domains[other] for other in union(variable))

    sizes = {variable: cells(variable) for variable in range(len(domains))}
    steps: list[Step] = []
    while sizes:
        variable = min(sizes, key=lambda number: (sizes[number], number))
        if sizes.pop(variable) > LARGEST:
            return None
        scope = union(variable)
        rest = tuple(other for other in scope if other != variable)
        used = sorted(holding[variable])
        steps.append(
            Step(
                variable=variable,
                tables=tuple(
                    (number, tuple(domains[v] if v in tables[number] else 1 for v in scope))
                    for number in used
                ),
                dim=scope.index(variable),
                rest=rest,
            )
        )
        made = len(scopes) + len(steps) - 1
        for number in used:
            for other in tables.pop(number):
                holding[other].discard(number)
        tables[made] = rest
        for other in rest:
            holding[other].add(made)
        for other in rest:
            sizes[other] = cells(other)
    return Elimination(num=len(scopes), num_variables=len(domains), steps=tuple(steps))


def minimize(elimination: Elimination, tables: Sequence[Floats]) -> tuple[float, tuple[int, ...]]:
    """The least sum of ``tables``, and the value of each variable there; of equal ones the first.

    The sum is infinite where no combination is allowed.
    """
    known: list[Floats | None] = [*tables, *[None] * len(elimination.steps)]
    chosen: list[NDArray[np.intp]] = []
    total = 0.0
    for index, step in enumerate(elimination.steps):
        joined: Floats | None = None
        for number, shape in step.tables:
            table = known[number]
            assert table is not None, "a table is used once"
            known[number] = None
            seen = table.reshape(shape)
            joined = seen if joined is None else joined + seen
        if joined is None:  # nothing depends on the variable
            chosen.append(np.zeros((), dtype=np.intp))
            known[elimination.num + index] = np.zeros(())
            continue
        chosen.append(joined.argmin(axis=step.dim))
        least = joined.min(axis=step.dim)
        known[elimination.num + index] = least
        if not step.rest:
            total += float(least)
    values = [0] * elimination.num_variables
    for step, choice in zip(reversed(elimination.steps), reversed(chosen), strict=True):
        values[step.variable] = int(choice[tuple(values[other] for other in step.rest)])
    return total, tuple(values)
