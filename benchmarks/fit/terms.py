"""Seconds that remember what they are made of: so much of each piece of work and each collective.

A layout's costs are sums of seconds of works and collectives. With these in place of plain seconds,
the planner's own code adds up which of them a block has; under other hardware only the pieces are
costed anew, again by that code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.moves import Collective
from autopar.solver.costs.comm import Group, Links
from autopar.solver.costs.kernels import Kernels
from autopar.solver.costs.work import Work
from autopar.solver.hardware import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One direction of an op."""

    work: Work
    backward: bool

    def seconds(self, kernels: Kernels, links: Links) -> float:
        """By the cost model."""
        return kernels.seconds(self.work, backward=self.backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A collective on a tensor of so many bytes."""

    collective: Collective
    num_bytes: float
    group: Group

    def seconds(self, kernels: Kernels, links: Links) -> float:
        """By the cost model."""
        return links.seconds(self.collective, self.num_bytes, self.group)


Piece = Kernel | Transfer
Terms = Mapping[Piece, float]
"""How often each piece is in a sum."""


class Seconds(float):
    """A number of seconds, and the sum that it is; other operations than these forget the sum."""

    __slots__ = ("terms",)
    terms: Terms

    def __new__(cls, value: float, terms: Terms) -> Seconds:
        self = super().__new__(cls, value)
        self.terms = terms
        return self

    def __add__(self, other: float) -> Seconds:
        terms = dict(self.terms)
        for piece, times in terms_of(other).items():
            terms[piece] = terms.get(piece, 0.0) + times
        return Seconds(float(self) + float(other), terms)

    __radd__ = __add__

    def __sub__(self, other: float) -> Seconds:
        return self + -1.0 * other

    def __mul__(self, factor: float) -> Seconds:
        terms = {piece: times * factor for piece, times in self.terms.items()}
        return Seconds(float(self) * factor, terms)

    __rmul__ = __mul__


def terms_of(seconds: float) -> Terms:
    """The sum that a number of seconds is.

    Raises:
        ValueError: It is not 0, and no sum is known.
    """
    if isinstance(seconds, Seconds):
        return seconds.terms
    if seconds != 0:
        raise ValueError(f"nothing is known of {seconds} seconds")
    return {}


class RecordingKernels(Kernels):
    """Kernels whose seconds remember their work."""

    __slots__ = ()

    def seconds(self, work: Work, *, backward: bool = False) -> float:
        seconds = super().seconds(work, backward=backward)
        if seconds == 0:
            return 0.0
        # Sums of floats and of ints of the same value are the same work.
        work = dataclasses.replace(work, bytes=float(work.bytes))
        return Seconds(seconds, {Kernel(work=work, backward=backward): 1.0})


class RecordingLinks(Links):
    """Links whose seconds remember their collective."""

    __slots__ = ()

    def seconds(self, collective: Collective, num_bytes: float, group: Group) -> float:
        seconds = super().seconds(collective, num_bytes, group)
        if seconds == 0:
            return 0.0
        piece = Transfer(collective=collective, num_bytes=float(num_bytes), group=group)
        return Seconds(seconds, {piece: 1.0})


def recorders(cluster: Cluster) -> tuple[Kernels, Links]:
    """Kernels and links of a cluster that remember."""
    return RecordingKernels(cluster.hardware), RecordingLinks(cluster)
