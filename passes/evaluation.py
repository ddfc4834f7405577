"""Lower the eval graph of a model under the plan of its train graph.

Both graphs have the same blocks and parameters, and nearly the same ops: dropout is gone. So each
node is typed as its namesake of the train graph is, and one without a namesake takes its operands
as they come, or whole. Whatever is chosen is well-typed; moves make up for the rest.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence

from torch import fx

from autopar.ir.errors import InputError, PlacementError
from autopar.ir.graph import BlockKind, ModelGraph, Role, TensorInfo, ValueId, activation, info
from autopar.ir.layout import KindLayout, Layout, NodeTyping, operands_of
from autopar.ir.mesh import LAYOUT_AXES
from autopar.ir.placement import INVARIANT, Placement
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.rules.core import Option, normal_state
from autopar.ir.rules.local import require_compatible
from autopar.ir.rules.registry import rule_or_replicated
from autopar.ir.typecheck import (
    is_op,
    kind_options,
    option_for,
    outer_batch,
    placement_error,
    shared_factors_error,
)
from autopar.passes.pipeline import lower_at

_WHOLE: Placement = (INVARIANT,) * len(LAYOUT_AXES)


def lower_evaluation(
    trained: ModelGraph, plan: Plan, model: ModelGraph
) -> tuple[Program, ModelGraph]:
    """The program that evaluates, and the graph that it is of: ``model`` with kinds renamed.

    Args:
        trained: The train graph.
        plan: For ``trained``.
        model: The eval graph of the same model.

    Raises:
        InputError: The graphs have not the same blocks.
        PlacementError: A dim does not divide.
    """
    if len(model.blocks) != len(trained.blocks):
        raise InputError(
            f"in eval mode {model.name} has {len(model.blocks)} blocks, in train mode "
            f"{len(trained.blocks)}",
            hint="evaluate with a plan of its own: compile the model in eval mode",
        )
    paired = _paired(trained, model)
    layout = _Transfer(trained, plan, paired).layout()
    return lower_at(paired, layout, plan, fewer_chunks=True), paired


def _paired(trained: ModelGraph, model: ModelGraph) -> ModelGraph:
    """The eval graph, in which blocks of one kind are of one kind in the train graph, too."""
    kinds: dict[str, BlockKind] = {}
    blocks = []
    for block, other in zip(model.blocks, trained.blocks, strict=True):
        name = f"{block.kind}_{other.kind}"
        kinds.setdefault(name, dataclasses.replace(model.kind_of(block), name=name))
        blocks.append(dataclasses.replace(block, kind=name))
    return dataclasses.replace(model, blocks=tuple(blocks), kinds=kinds)


class _Transfer:
    """Types the nodes of ``model`` after those of ``trained``."""

    def __init__(self, trained: ModelGraph, plan: Plan, model: ModelGraph) -> None:
        self.trained, self.model = trained, model
        self.given = plan.typed_layout()
        mesh = plan.device_mesh()
        self.degrees = mesh.degrees()
        self.batch = plan.batch.micro_batch_size * mesh.batch_ranks
        self.values = _placed_values(trained, self.given)

    def layout(self) -> Layout:
        first = {block.kind: block for block in reversed(self.model.blocks)}
        return {
            name: self._kind(kind, first[name].bindings, first[name].index)
            for name, kind in self.model.kinds.items()
        }

    def _kind(self, kind: BlockKind, bindings: Sequence[ValueId], index: int) -> KindLayout:
        other = self.trained.kind_of(self.trained.blocks[index])
        namesakes = {node.name: node for node in other.graph.nodes}
        options = {
            axis: kind_options(
                kind,
                axis=axis,
                axis_size=self.degrees[axis],
                batch=outer_batch(self.batch, self.degrees, axis),
            )
            for axis in LAYOUT_AXES
            if self.degrees[axis] > 1
        }
        typed: dict[str, NodeTyping] = {}
        for node, value in zip(kind.placeholders, bindings, strict=True):
            placement = self._value(value, info(node).tensor)
            typed[node.name] = NodeTyping(operands=(), results=(placement,))
        for node in kind.graph.nodes:
            if node.target is operator.getitem:
                source, position = node.args
                element = typed[source.name].results[position]
                typed[node.name] = NodeTyping(operands=(), results=(element,))
            elif is_op(node):
                own = {axis: found[node.name] for axis, found in options.items()}
                known = self._as_namesake(node, namesakes.get(node.name), self.given[other.name])
                typed[node.name] = self._choose(node, own, known, typed)
        demands = tuple(
            self._value(activation(index, output), info(node).tensor)
            for output, node in enumerate(kind.outputs)
        )
        typed[kind.graph.output_node().name] = NodeTyping(operands=demands, results=())
        return typed

    def _value(self, value: ValueId, tensor: TensorInfo) -> Placement:
        """The placement that the train graph gives a value, if it can be had here."""
        placement = self.values.get(value, _WHOLE)
        return placement if self._fits(placement, tensor) else _WHOLE

    def _fits(self, placement: Placement, tensor: TensorInfo) -> bool:
        return placement_error(placement, tensor, degrees=self.degrees, batch=self.batch) is None

    def _as_namesake(
        self, node: fx.Node, other: fx.Node | None, layout: KindLayout
    ) -> NodeTyping | None:
        if other is None or other.target is not node.target:
            return None
        typing = layout[other.name]
        alike = len(typing.operands) == len(operands_of(node))
        return typing if alike and len(typing.results) == len(info(node).tensors) else None

    def _choose(
        self,
        node: fx.Node,
        options: Mapping[str, Sequence[Option]],
        known: NodeTyping | None,
        typed: Mapping[str, NodeTyping],
    ) -> NodeTyping:
        operands = operands_of(node)
        given = tuple(typed[operand.name].results[0] for operand in operands)
        if known is not None and self._is_valid(node, options, known):
            return known
        chosen: dict[str, Option] = {}
        for axis, own in options.items():
            at = LAYOUT_AXES.index(axis)
            states = tuple(
                normal_state(placement[at], info(operand).tensor)
                for placement, operand in zip(given, operands, strict=True)
            )
            found = next((option for option in own if option.operands == states), None)
            if found is not None:
                chosen[axis] = found
        following = _typing(node, chosen)
        if len(chosen) == len(options) and self._is_valid(node, options, following):
            return following
        return NodeTyping(
            operands=(_WHOLE,) * len(operands), results=(_WHOLE,) * len(info(node).tensors)
        )

    def _is_valid(
        self, node: fx.Node, options: Mapping[str, Sequence[Option]], typing: NodeTyping
    ) -> bool:
        tensors = [info(operand).tensor for operand in operands_of(node)]
        pairs = zip(
            (*typing.operands, *typing.results), (*tensors, *info(node).tensors), strict=True
        )
        if not all(self._fits(placement, tensor) for placement, tensor in pairs):
            return False
        chosen: dict[str, Option] = {}
        for axis, own in options.items():
            option = option_for(own, node, typing, LAYOUT_AXES.index(axis))
            if option is None:
                return False
            chosen[axis] = option
        rule = rule_or_replicated(node)
        if shared_factors_error(rule, chosen, degrees=self.degrees, batch=self.batch):
            return False
        try:
            require_compatible(node, chosen)
        except PlacementError:
            return False
        return True


def _typing(node: fx.Node, chosen: Mapping[str, Option]) -> NodeTyping:
    """The typing that has these options on their axes, and ``I`` on others."""

    def placements(count: int, of_results: bool) -> tuple[Placement, ...]:
        return tuple(
            tuple(
                (chosen[axis].results if of_results else chosen[axis].operands)[index]
                if axis in chosen
                else INVARIANT
                for axis in LAYOUT_AXES
            )
            for index in range(count)
        )

    return NodeTyping(
        operands=placements(len(operands_of(node)), False),
        results=placements(len(info(node).tensors), True),
    )


def _placed_values(model: ModelGraph, layout: Layout) -> dict[ValueId, Placement]:
    """The placement of every value that blocks read or hand on."""
    found: dict[ValueId, Placement] = {}
    for block in model.blocks:
        kind, typed = model.kind_of(block), layout[block.kind]
        for node, value in zip(kind.placeholders, block.bindings, strict=True):
            if value.role is not Role.ACTIVATION:
                found[value] = typed[node.name].results[0]
        for index, placement in enumerate(typed[kind.graph.output_node().name].operands):
            found[activation(block.index, index)] = placement
    return found
