"""What random calls are made of: sizes, tensors, and a name for each maker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from autopar.testing.prove import Sample

_aten = torch.ops.aten


class Source:
    """Draws sizes and makes tensors. Sizes are often multiples of the axis that is tried."""

    def __init__(self, draw: Callable[[st.SearchStrategy[int]], int], axis_size: int) -> None:
        self._draw = draw
        self._axis_size = axis_size
        self._generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def size(self, largest: int = 2) -> int:
        """A multiple of the axis size, or any small size."""
        multiple = self._axis_size * self.number(1, largest)
        return multiple if self.flag() or self.flag() else self.number(1, 3)

    def multiple(self) -> int:
        """The axis size, or twice that."""
        return self._axis_size * self.number(1, 2)

    def number(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def flag(self) -> bool:
        return bool(self._draw(st.integers(0, 1)))

    def shape(self, low: int = 0, high: int = 3) -> list[int]:
        return [self.size() for _ in range(self.number(low, high))]

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def positive(self, *shape: int) -> Tensor:
        return self.floats(*shape).abs() + 0.5

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self._generator)

    def booleans(self, *shape: int) -> Tensor:
        return self.integers(2, *shape).bool()

    def broadcastable(self, shape: Iterable[int]) -> list[int]:
        """A shape that is broadcast to ``shape``."""
        sizes = [1 if self.number(0, 3) == 0 else size for size in shape]
        return sizes[self.number(0, len(sizes)) :]


SampleMaker = Callable[[Source], Sample]

SAMPLES: dict[str, SampleMaker] = {}
"""Maker of samples by a name that starts with the op's name."""


def sample(*names: str) -> Callable[[Any], Any]:
    """Register a maker ``(source) -> Sample``, or ``(source, name)`` for several names."""

    def decorate(make: Any) -> Any:
        for name in names:
            SAMPLES[name] = make if len(names) == 1 else _bound(make, name)
        return make

    return decorate


def _bound(make: Any, name: str) -> SampleMaker:
    return lambda source: make(source, name)


def overload(name: str) -> Any:
    packet, _, found = name.partition(" ")[0].partition(".")
    return getattr(getattr(_aten, packet), found or "default")


def call(name: str, *args: Any, **kwargs: Any) -> Sample:
    return Sample(target=overload(name), args=args, kwargs=kwargs)
