"""Insert moves: what readers demand otherwise than it is given is moved, once for all of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.ir.graph import NodeInfo, info, set_info
from autopar.ir.layout import NodeTyping, operands_of
from autopar.ir.mesh import LAYOUT_AXES, Mesh
from autopar.ir.move_path import MoveStep, move_path
from autopar.ir.moves import move
from autopar.ir.placement import Placement, State
from autopar.ir.program import axis_handle
from autopar.passes.base import TypedKind, copy_graph, normal_placement, with_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertMoves:
    """Every node's own typing holds → every operand is placed as its consumer demands.

    A change on several axes becomes a path of one-axis moves, the cheapest legal one on ``mesh``.
    Consumers that demand the same placement of a value share its moves, which stand before the
    first of them. Tensors without gradient know no difference between ``I`` and ``R``, so that no
    move changes one into the other.
    """

    mesh: Mesh

    def __call__(self, typed: TypedKind) -> TypedKind:
        if all(not _unmet(node, typed) for node in typed.kind.graph.nodes):
            return typed
        graph, copies = copy_graph(typed.kind.graph)
        copied = TypedKind(kind=with_graph(typed.kind, graph), layout=typed.layout)
        inserter = _Inserter(copied, self.mesh.layout_sizes())
        for node in copies.values():
            inserter.meet_demands(node)
        return TypedKind(kind=copied.kind, layout=inserter.layout)


def _unmet(node: fx.Node, typed: TypedKind) -> bool:
    """Whether some operand of ``node`` is placed otherwise than it demands."""
    if node.op == "get_attr":
        return False
    demands = typed.layout[node.name].operands
    pairs = zip(operands_of(node), demands, strict=True)
    return any(not _same(operand, typed.layout[operand.name].results[0], d) for operand, d in pairs)


def _same(value: fx.Node, given: Placement, demanded: Placement) -> bool:
    tensor = info(value).tensor
    return normal_placement(given, tensor) == normal_placement(demanded, tensor)


class _Inserter:
    """Rewrites one graph in place; ``layout`` is the typing of what it has become."""

    def __init__(self, typed: TypedKind, axis_sizes: tuple[int, ...]) -> None:
        self.graph = typed.kind.graph
        self.layout = dict(typed.layout)
        self.axis_sizes = axis_sizes
        self.moved: dict[tuple[fx.Node, Placement], fx.Node] = {}

    def meet_demands(self, node: fx.Node) -> None:
        """Replace operands of ``node`` by moved ones where they are not placed as it demands."""
        own = set(operands_of(node))
        if not own:
            return
        demands = iter(self.layout[node.name].operands)

        def replacement(operand: fx.Node) -> fx.Node:
            return self.placed(operand, next(demands), node) if operand in own else operand

        node.args = fx.map_arg(node.args, replacement)
        node.kwargs = fx.map_arg(node.kwargs, replacement)
        if node.target is move:  # of an earlier run
            self.moved[operands_of(node)[0], self.layout[node.name].results[0]] = node

    def placed(self, value: fx.Node, demanded: Placement, consumer: fx.Node) -> fx.Node:
        """``value`` as ``demanded``: itself, or the last of its moves made for ``consumer``."""
        given = self.layout[value.name].results[0]
        if _same(value, given, demanded):
            return value
        tensor = info(value).tensor
        source, target = normal_placement(given, tensor), normal_placement(demanded, tensor)
        last = value
        for step in move_path(source, target, self.axis_sizes, requires_grad=tensor.requires_grad):
            key = (last, step.reached)
            if key not in self.moved:
                self.moved[key] = self.insert(value, last, step, consumer)
            last = self.moved[key]
        return last

    def insert(
        self, value: fx.Node, operand: fx.Node, step: MoveStep, consumer: fx.Node
    ) -> fx.Node:
        axis = LAYOUT_AXES[step.axis]
        handle = axis_handle(self.graph, axis)
        with self.graph.inserting_before(consumer):
            node = self.graph.create_node(
                "call_function",
                move,
                (operand, handle, str(step.source), str(step.target)),
                name=f"{value.name}_{axis}_{_suffix(step.target)}",
            )
        origin = info(value)
        set_info(
            node, NodeInfo(tensors=(origin.tensor,), module=origin.module, source=origin.source)
        )
        before = normal_placement(self.layout[operand.name].results[0], origin.tensor)
        self.layout[node.name] = NodeTyping(operands=(before,), results=(step.reached,))
        return node


def _suffix(state: State) -> str:
    """``state`` as part of a name: ``r``, ``s1``, ``s2_4_1_1``."""
    blocks = "" if state.blocks == (1,) else "_" + "_".join(map(str, state.blocks))
    return f"s{state.dim}{blocks}" if state.is_sharded else state.kind.value.lower()
