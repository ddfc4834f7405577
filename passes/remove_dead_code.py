"""Remove dead code: nodes whose value nobody reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.passes.base import TypedKind, copy_graph, with_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveDeadCode:
    """Any typed kind → all nodes but placeholders and the output have users.

    Ops of graphs are pure, and so are moves: ranks that skip one skip it together.
    """

    def __call__(self, typed: TypedKind) -> TypedKind:
        names = {node.name for node in typed.kind.graph.nodes}
        if not any(map(_is_dead, typed.kind.graph.nodes)) and typed.layout.keys() <= names:
            return typed
        graph, _ = copy_graph(typed.kind.graph)
        for node in reversed(graph.nodes):
            if _is_dead(node):
                graph.erase_node(node)
        kept = {node.name for node in graph.nodes}
        layout = {name: typing for name, typing in typed.layout.items() if name in kept}
        return TypedKind(kind=with_graph(typed.kind, graph), layout=layout)


def _is_dead(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "output") and not node.users
