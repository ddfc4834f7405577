"""A value in the making: its states and demands are collected op by op."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.ir.graph import Role, TensorInfo
from autopar.ir.placement import State


@dataclass(slots=True, kw_only=True)
class Draft:
    """Result ``result`` of a node of kind number ``kind``. Placeholders have a role and a class.

    ``states`` and ``demanded`` are ordered sets; ``outer`` are its states on the typed axes.
    """

    kind: int
    node: str
    result: int
    tensor: TensorInfo
    role: Role | None
    state_class: int | None
    outer: tuple[State, ...] = ()
    states: dict[State, None] = field(default_factory=dict)
    demanded: dict[State, None] = field(default_factory=dict)
