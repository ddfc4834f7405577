"""Which block each node belongs to: prologue, repeated modules in order, what is between them,
epilogue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.capture.flat import FlatGraph, is_random
from autopar.capture.repeats import Member, find_members
from autopar.ir.graph import Role, info

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """``slots`` numbers the block of each placed node, not always densely. All other calls are
    ``floating``: cheap and without activations, so every block that needs one computes it itself.
    ``paths`` are those of the members.
    """

    slots: dict[fx.Node, int]
    floating: set[fx.Node]
    paths: dict[int, str]


def partition(flat: FlatGraph) -> Partition:
    """Assign every call to a block, such that blocks only read what earlier blocks produce.

    Member k has slot 2k+1. Slot 2k+2 holds what follows a member that is the last of its
    container; what stands between two members of one container belongs to the first of them.
    """
    calls = list(flat.calls())
    members = find_members(calls)
    order = list(dict.fromkeys(members[node] for node in calls if node in members))
    floating = _floating(flat, calls, members)
    slots = _Slots(order)
    for node in calls:
        if node not in floating:
            slots.place(node, members.get(node))
    _sink(calls, slots.of, members, flat)
    paths = {2 * index + 1: member.path for index, member in enumerate(order)}
    return Partition(slots=slots.of, floating=floating, paths=paths)


class _Slots:
    def __init__(self, order: list[Member]) -> None:
        self.of: dict[fx.Node, int] = {}
        self._order = order
        self._number = {member: 2 * index + 1 for index, member in enumerate(order)}
        self._glue: dict[int, list[Any]] = {}

    def place(self, node: fx.Node, member: Member | None) -> None:
        latest = max((self.of.get(source, 0) for source in node.all_input_nodes), default=0)
        if member is not None:
            self.of[node] = max(latest, self._number[member])
        elif latest % 2 == 0 or self._reads_tuple(node):
            self.of[node] = latest
        else:
            self.of[node] = latest if self._is_glue(node, latest) else latest + 1

    def _reads_tuple(self, node: fx.Node) -> bool:
        source = node.args[0] if node.args else None
        return isinstance(source, fx.Node) and info(source).is_tuple

    def _is_glue(self, node: fx.Node, slot: int) -> bool:
        """Whether ``node``, after the member in ``slot``, belongs to it.

        After the last member of a container only as much does as after the one before it.
        """
        index = slot // 2
        glue = self._glue.setdefault(slot, [])
        container = self._order[index].container
        is_last = index + 1 == len(self._order) or self._order[index + 1].container != container
        if is_last:
            same = index > 0 and self._order[index - 1].container == container
            before = self._glue.get(slot - 2, []) if same else []
            if before[len(glue) : len(glue) + 1] != [node.target]:
                return False
        glue.append(node.target)
        return True


_VIEWS = {
    _aten.transpose.int,
    _aten.reshape.default,
    _aten.permute.default,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.expand.default,
    _aten.slice.Tensor,
    _aten.to.dtype,
    _aten.detach.default,
}

_HEAVY = {
    _aten.linear.default,
    _aten.matmul.default,
    _aten.bmm.default,
    _aten.einsum.default,
    _aten.scaled_dot_product_attention.default,
    _aten.embedding.default,
}


def _floating(
    flat: FlatGraph, calls: list[fx.Node], members: dict[fx.Node, Member]
) -> set[fx.Node]:
    """Cheap calls that depend on no parameter, and views of parameters outside of repeated
    modules.
    """
    of_inputs: set[fx.Node] = set()
    of_parameters: set[fx.Node] = set()
    for node, value in flat.bindings.items():
        (of_parameters if value.role is Role.PARAMETER else of_inputs).add(node)
        if value.role is Role.CONSTANT:
            of_parameters.add(node)
    for node in calls:
        sources = node.all_input_nodes
        if (
            not is_random(node)
            and node.target not in _HEAVY
            and all(s in of_inputs for s in sources)
        ):
            of_inputs.add(node)
        elif (
            node.target in _VIEWS
            and node not in members
            and all(s in of_parameters for s in sources)
        ):
            of_parameters.add(node)
    return {node for node in calls if node in of_inputs or node in of_parameters}


def _sink(
    calls: list[fx.Node],
    slots: dict[fx.Node, int],
    members: dict[fx.Node, Member],
    flat: FlatGraph,
) -> None:
    """Move what is computed from parameters alone, outside of repeated modules, to its first
    reader.
    """
    without_input: Callable[[fx.Node], bool] = _without_input(flat, calls).__contains__
    for node in reversed(calls):
        if node in slots and node not in members and without_input(node):
            readers = [slots[user] for user in node.users if user in slots]
            if len(readers) == len(node.users):
                slots[node] = min(readers)


def _without_input(flat: FlatGraph, calls: list[fx.Node]) -> set[fx.Node]:
    found = {node for node, value in flat.bindings.items() if value.role is not Role.INPUT}
    for node in calls:
        if all(source in found for source in node.all_input_nodes):
            found.add(node)
    return found
