"""Which placeholders and block results must agree: one class for each set, found by union."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from autopar.ir.graph import ModelGraph, Role, activation

Position = tuple[str, str, int]
"""A placeholder (kind, ``in``, index) or block result (kind, ``out``, index)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """Class number of every position, numbered in order of the model, and parameters per class."""

    of: Mapping[Position, int]
    parameters: tuple[tuple[str, ...], ...]
    num: int
    loss: int
    weight: int | None


def state_classes(model: ModelGraph) -> Classes:
    """The classes of a model: what blocks hand on, parameters, inputs."""
    union = _Union()
    positions: list[Position] = []
    for name, kind in model.kinds.items():
        positions += [(name, "in", index) for index in range(len(kind.roles))]
        positions += [(name, "out", index) for index in range(len(kind.outputs))]
    for block in model.blocks:
        kind = model.kind_of(block)
        for index, (role, value) in enumerate(zip(kind.roles, block.bindings, strict=True)):
            here: Position = (block.kind, "in", index)
            if role is Role.ACTIVATION:
                source, output = model.producer(value)
                union.join((model.blocks[source].kind, "out", output), here)
            else:
                union.join(value, here)
    numbers: dict[Hashable, int] = {}
    of = {
        position: numbers.setdefault(union.find(position), len(numbers)) for position in positions
    }
    parameters: list[dict[str, None]] = [{} for _ in numbers]
    for block in model.blocks:
        for index, value in enumerate(block.bindings):
            if value.role is Role.PARAMETER:
                parameters[of[block.kind, "in", index]][value.name] = None

    def class_of_result(value: object) -> int | None:
        for block in model.blocks:
            for output in range(len(model.kind_of(block).outputs)):
                if activation(block.index, output) == value:
                    return of[block.kind, "out", output]
        return None

    loss = class_of_result(model.loss)
    assert loss is not None, "no block returns the loss"
    return Classes(
        of=of,
        parameters=tuple(map(tuple, parameters)),
        num=len(numbers),
        loss=loss,
        weight=class_of_result(model.weight),
    )


class _Union:
    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}

    def find(self, item: Hashable) -> Hashable:
        root = item
        while self.parent.get(root, root) != root:
            root = self.parent[root]
        while self.parent.get(item, item) != root:
            self.parent[item], item = root, self.parent[item]
        return root

    def join(self, one: Hashable, other: Hashable) -> None:
        self.parent.setdefault(one, one)
        self.parent.setdefault(other, other)
        self.parent[self.find(other)] = self.find(one)
