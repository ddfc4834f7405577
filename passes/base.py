"""What passes work on: a kind of block with its typing, and what they give back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import fx

from autopar.ir.graph import BlockKind, TensorInfo
from autopar.ir.layout import KindLayout
from autopar.ir.placement import Placement
from autopar.ir.rules.core import normal_state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TypedKind:
    """A kind of block and the placements of its nodes. Passes make another, they change none."""

    kind: BlockKind
    layout: KindLayout


class Pass(Protocol):
    """One rewrite. A pass is a frozen dataclass whose fields are its options.

    Its docstring says what it requires and ensures. Its result is the very object that it was given
    where there is nothing to change, so that ``result is typed`` says so; run twice, the second run
    changes nothing.
    """

    def __call__(self, typed: TypedKind) -> TypedKind:
        """The rewritten kind."""
        ...


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of ``graph`` with the same names and facts, and the copy of each node."""
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = copied.node_copy(node, lambda used: copies[used])
        assert copies[node].name == node.name, f"{node.name} became {copies[node].name}"
    return copied, copies


def with_graph(kind: BlockKind, graph: fx.Graph) -> BlockKind:
    """The kind with another graph, of the same placeholders and outputs."""
    return BlockKind(name=kind.name, graph=graph, roles=kind.roles)


def normal_placement(placement: Placement, tensor: TensorInfo) -> Placement:
    """``placement``, with ``I`` written ``R`` for tensors without gradient."""
    return tuple(normal_state(state, tensor) for state in placement)
