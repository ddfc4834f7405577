"""The type checker: a layout under which every node has a valid typing has correct gradients.

Between nodes anything goes, because every change of state is a move that the passes insert. What is
checked is each node by itself, each placement by itself, and that blocks agree at their boundary.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.ir.errors import PlacementError
from autopar.ir.graph import (
    BlockKind,
    ModelGraph,
    NodeInfo,
    Role,
    TensorInfo,
    ValueId,
    activation,
    evaluate,
    info,
)
from autopar.ir.layout import KindLayout, Layout, NodeTyping, describe, operands_of
from autopar.ir.mesh import BATCH_AXES, LAYOUT_AXES
from autopar.ir.move_path import is_legal_step
from autopar.ir.moves import move
from autopar.ir.placement import Placement, State, StateKind
from autopar.ir.program import AXIS_HANDLE
from autopar.ir.rules.core import (
    BlockPatterns,
    Option,
    Rule,
    block_patterns,
    normal_state,
    options_of,
)
from autopar.ir.rules.local import require_compatible
from autopar.ir.rules.random import require_drawable
from autopar.ir.rules.registry import rule_or_replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRules:
    """Rules of the ops of a kind by node name, and the block structures that they know of."""

    rules: Mapping[str, Rule]
    patterns: BlockPatterns


def kind_rules(kind: BlockKind) -> KindRules:
    """The rules of all ``call_function`` nodes of ``kind`` but ``getitem`` and moves.

    They depend neither on axes nor on the batch: compute them once and hand them to
    ``kind_options``.
    """
    rules = {node.name: rule_or_replicated(node) for node in kind.graph.nodes if is_op(node)}
    return KindRules(rules=rules, patterns=block_patterns(tuple(rules.values())))


def is_op(node: fx.Node) -> bool:
    """True for nodes that choose an option: all calls but ``getitem`` and moves."""
    return node.op == "call_function" and node.target not in (operator.getitem, move)


def kind_options(
    kind: BlockKind, *, axis: str, axis_size: int, batch: int, rules: KindRules | None = None
) -> dict[str, tuple[Option, ...]]:
    """All valid options on one axis of all ops of a kind, by node name.

    Args:
        kind: The kind of block.
        axis: Name of the axis.
        axis_size: Ranks on the axis.
        batch: Sequences per rank of the axes further out than ``axis``.
        rules: ``kind_rules(kind)``, if it is at hand.

    Raises:
        PlacementError: A random op draws numbers that have no logical position.
    """
    rules = rules or kind_rules(kind)
    found: dict[str, tuple[Option, ...]] = {}
    for node in kind.graph.nodes:
        if not is_op(node):
            continue
        options = options_of(
            rules.rules[node.name],
            tuple(info(operand).tensor for operand in operands_of(node)),
            info(node).tensors,
            axis_size=axis_size,
            batch=batch,
            patterns=rules.patterns,
        )
        if axis_size > 1:
            require_drawable(node)
        found[node.name] = options
    return found


def option_for(
    options: Sequence[Option], node: fx.Node, typing: NodeTyping, axis_index: int
) -> Option | None:
    """The option whose states are those of ``typing`` on one axis; None when there is none.

    ``I`` and ``R`` are the same for tensors without gradient.
    """
    operands = tuple(
        normal_state(placement[axis_index], info(operand).tensor)
        for placement, operand in zip(typing.operands, operands_of(node), strict=True)
    )
    results = tuple(
        normal_state(placement[axis_index], tensor)
        for placement, tensor in zip(typing.results, info(node).tensors, strict=True)
    )
    for option in options:
        if option.operands == operands and option.results == results:
            return option
    return None


def outer_batch(batch: int, degrees: Mapping[str, int], axis: str) -> int:
    """Sequences per rank of the axes further out than ``axis``, if they share the batch evenly."""
    for outer in LAYOUT_AXES[: LAYOUT_AXES.index(axis)]:
        if outer in BATCH_AXES and batch % degrees[outer] == 0:
            batch //= degrees[outer]
    return batch


def chosen_options(
    kind: BlockKind, layout: KindLayout, *, degrees: Mapping[str, int], batch: int
) -> dict[str, dict[str, Option]]:
    """The option of every op of ``kind`` on every axis of several ranks: node name → axis → option.

    Args:
        kind: The kind of block; moves may have been inserted.
        layout: Typing of all its nodes.
        degrees: Ranks of each of ``LAYOUT_AXES``.
        batch: Sequences of the micro-batch over all data ranks.

    Raises:
        PlacementError: Some node is not well-typed; the message names the op, its source line, the
            axis, the states and the options that it has.
    """
    for node in kind.graph.nodes:
        if node.op != "get_attr":
            _check_typing(node, layout, degrees, batch)
    rules = _with_patterns_of(kind_rules(kind), kind, layout, batch)
    found: dict[str, dict[str, Option]] = {name: {} for name in rules.rules}
    for index, axis in enumerate(LAYOUT_AXES):
        if degrees[axis] == 1:
            continue  # all states are the same there
        options = kind_options(
            kind,
            axis=axis,
            axis_size=degrees[axis],
            batch=outer_batch(batch, degrees, axis),
            rules=rules,
        )
        for node in kind.graph.nodes:
            if not is_op(node):
                continue
            option = option_for(options[node.name], node, layout[node.name], index)
            if option is None:
                raise _no_option(node, layout[node.name], index, options[node.name])
            found[node.name][axis] = option
    for node in kind.graph.nodes:
        if is_op(node):
            own = found[node.name]
            reason = shared_factors_error(rules.rules[node.name], own, degrees=degrees, batch=batch)
            if reason:
                raise _error(node, reason)
            require_compatible(node, own)
    return found


def shared_factors_error(
    rule: Rule, options: Mapping[str, Option], *, degrees: Mapping[str, int], batch: int
) -> str | None:
    """Why the axes that split the same factor do not divide it together; None when they do."""
    axes: dict[str, list[str]] = {}
    for axis, option in options.items():
        if option.factor is not None and degrees[axis] > 1:
            axes.setdefault(option.factor, []).append(axis)
    for factor, splitting in axes.items():
        if len(splitting) == 1:
            continue  # the option by itself divides it, or pads it
        size = evaluate(rule.sizes[factor], batch)
        num_ranks = math.prod(degrees[axis] for axis in splitting)
        if size % num_ranks:
            return f"splits {factor}, of size {size}, over {num_ranks} ranks of all axes"
    return None


def _with_patterns_of(
    rules: KindRules, kind: BlockKind, layout: KindLayout, batch: int
) -> KindRules:
    """The rules, and the block structures that ``layout`` uses.

    A node that knew of one may have been removed since the layout was made, and any structure is
    sound where all tensors of an op share it.
    """
    patterns = {size: set(known) for size, known in rules.patterns.items()}
    for node in kind.graph.nodes:
        typing = layout.get(node.name)
        if typing is None:
            continue
        tensors = [info(operand).tensor for operand in operands_of(node)]
        results = () if node.op == "output" else info(node).tensors
        placements = (*typing.operands, *typing.results)
        for placement, tensor in zip(placements, (*tensors, *results), strict=True):
            for state in placement:
                if len(state.blocks) > 1 and state.dim < len(tensor.shape):
                    size = tensor.shape_at(batch)[state.dim]
                    patterns.setdefault(size, set()).add(state.blocks)
    frozen = {size: frozenset(known) for size, known in patterns.items()}
    return KindRules(rules=rules.rules, patterns=frozen)


def check_kind(
    kind: BlockKind, layout: KindLayout, *, degrees: Mapping[str, int], batch: int
) -> None:
    """Raise ``PlacementError`` unless all nodes of ``kind`` are well-typed (``chosen_options``)."""
    chosen_options(kind, layout, degrees=degrees, batch=batch)
    roles = dict(zip(kind.placeholders, kind.roles, strict=True))
    for node in kind.graph.nodes:
        typing = layout.get(node.name)
        if typing is None:
            continue
        if node.op == "placeholder" and roles[node] is not Role.ACTIVATION:
            for axis, state in zip(LAYOUT_AXES, typing.results[0], strict=True):
                if state.kind is StateKind.PARTIAL and degrees[axis] > 1:
                    raise _error(
                        node,
                        f"is P on axis {axis}, but a {roles[node].value} is no sum over ranks",
                        hint="make it I, R or sharded",
                    )
        elif node.target is operator.getitem:
            _check_element(node, layout)
        elif node.target is move:
            _check_move(node, typing)


def check_model(
    model: ModelGraph, layout: Layout, *, degrees: Mapping[str, int], batch: int
) -> None:
    """Raise ``PlacementError`` unless a whole model is well-typed.

    Beside every kind by itself: a value has one placement wherever blocks hand it on, and the loss
    is ``I`` or ``P`` on every axis, because ``R`` seeded with 1 is too large by the number of
    ranks.
    """
    for name, kind in model.kinds.items():
        if name not in layout:
            raise PlacementError(f"the layout has no kind of block {name}")
        check_kind(kind, layout[name], degrees=degrees, batch=batch)
    given = _boundary(model, layout)
    for block in model.blocks:
        kind = model.kind_of(block)
        for node, value in zip(kind.placeholders, block.bindings, strict=True):
            if value.role is not Role.ACTIVATION:
                continue
            tensor = info(node).tensor
            taken = layout[block.kind][node.name].results[0]
            if _normal(taken, tensor) != _normal(given[value], tensor):
                producer = model.blocks[model.producer(value)[0]]
                raise _error(
                    node,
                    f"is taken as {describe(taken)} by block {block.path or block.index}, but "
                    f"block {producer.path or producer.index} gives it as {describe(given[value])}",
                    hint="a value has one placement where blocks hand it on",
                )
    for axis, state in zip(LAYOUT_AXES, given[model.loss], strict=True):
        if degrees[axis] > 1 and state.kind not in (StateKind.INVARIANT, StateKind.PARTIAL):
            raise PlacementError(
                f"the loss is {state} on axis {axis}",
                hint="let the last block demand it as I or P: its gradient is seeded with 1",
            )


def check_moved(kind: BlockKind, layout: KindLayout) -> None:
    """Raise ``PlacementError`` unless every operand is placed as its reader demands.

    This is what inserting moves ensures, beyond ``check_kind``.
    """
    for node in kind.graph.nodes:
        operands = operands_of(node)
        demands = layout[node.name].operands if operands else ()
        for operand, demanded in zip(operands, demands, strict=True):
            given, tensor = layout[operand.name].results[0], info(operand).tensor
            if _normal(given, tensor) != _normal(demanded, tensor):
                raise _error(
                    node,
                    f"demands {operand.name} as {describe(demanded)}, which is {describe(given)}",
                )


def _boundary(model: ModelGraph, layout: Layout) -> dict[ValueId, Placement]:
    """The placement in which every block gives its results."""
    found: dict[ValueId, Placement] = {}
    for block in model.blocks:
        output = model.kind_of(block).graph.output_node()
        for index, placement in enumerate(layout[block.kind][output.name].operands):
            found[activation(block.index, index)] = placement
    return found


def _check_typing(
    node: fx.Node, layout: KindLayout, degrees: Mapping[str, int], batch: int
) -> None:
    """A node has one placement for each tensor, and each of them divides."""
    typing = layout.get(node.name)
    if typing is None:
        raise _error(node, "has no typing")
    operands = [info(operand).tensor for operand in operands_of(node)]
    results = () if node.op == "output" else info(node).tensors
    for what, placements, tensors in (
        ("operands", typing.operands, operands),
        ("results", typing.results, results),
    ):
        if len(placements) != len(tensors):
            raise _error(
                node, f"has {len(tensors)} {what}, but {len(placements)} placements for them"
            )
        for placement, tensor in zip(placements, tensors, strict=True):
            reason = placement_error(placement, tensor, degrees=degrees, batch=batch)
            if reason:
                raise _error(node, f"cannot be placed as {describe(placement)}: {reason}")


def placement_error(
    placement: Placement, tensor: TensorInfo, *, degrees: Mapping[str, int], batch: int
) -> str | None:
    """Why ``tensor`` cannot have ``placement``; None when it can.

    Axes that share a dim divide it one after the other, the outermost first, so that an inner one
    knows nothing of blocks.
    """
    if len(placement) != len(LAYOUT_AXES):
        return f"there are {len(LAYOUT_AXES)} axes"
    sharded: dict[int, int] = {}
    for index, (axis, state) in enumerate(zip(LAYOUT_AXES, placement, strict=True)):
        if not state.is_sharded or degrees[axis] == 1:
            continue
        if state.dim >= len(tensor.shape):
            return f"it has {len(tensor.shape)} dims"
        if state.dim in sharded and (state.blocks != (1,) or state.padded_size):
            return f"axis {axis} cannot shard the blocks of a dim that an outer axis shards too"
        if any(s.is_sharded and s.dim == state.dim and s.padded_size for s in placement[:index]):
            return f"axis {axis} cannot shard a dim that an outer axis pads"
        size = sharded.get(state.dim)
        size = tensor.shape_at(batch)[state.dim] if size is None else size
        shares = state.shares(size, degrees[axis])
        if shares is None:
            return f"{size} does not divide into {state} over {degrees[axis]} ranks of {axis}"
        sharded[state.dim] = sum(shares)
    return None


def _check_element(node: fx.Node, layout: KindLayout) -> None:
    source, index = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(index, int)
    tensor = info(node).tensor
    element, own = layout[source.name].results[index], layout[node.name].results[0]
    if _normal(element, tensor) != _normal(own, tensor):
        raise _error(
            node, f"is {describe(own)}, but the element that it reads is {describe(element)}"
        )


def _check_move(node: fx.Node, typing: NodeTyping) -> None:
    """A move changes the state on one axis as its arguments say, and no axis further in shards a
    dim that it changes.
    """
    tensor = info(node).tensor
    before, after = _normal(typing.operands[0], tensor), _normal(typing.results[0], tensor)
    changed = [index for index, state in enumerate(before) if state != after[index]]
    if len(changed) > 1:
        raise _error(node, f"moves on several axes at once: {describe(before)} → {describe(after)}")
    for index in changed:
        _, handle, *states = node.args
        assert isinstance(handle, fx.Node)
        written = (handle.target, *states)
        if written != (
            AXIS_HANDLE.format(LAYOUT_AXES[index]),
            *map(str, (before[index], after[index])),
        ):
            raise _error(
                node, f"is typed {describe(before)} → {describe(after)}, but moves {written}"
            )
        if not is_legal_step(before, index, after[index]):
            raise _error(
                node,
                f"moves {describe(before)} → {describe(after)}, which is not the innermost "
                "sharding",
            )


def _normal(placement: Placement, tensor: TensorInfo) -> tuple[State, ...]:
    return tuple(normal_state(state, tensor) for state in placement)


def _no_option(
    node: fx.Node, typing: NodeTyping, axis_index: int, options: Sequence[Option]
) -> PlacementError:
    operands = ", ".join(str(placement[axis_index]) for placement in typing.operands)
    results = ", ".join(str(placement[axis_index]) for placement in typing.results)
    return _error(
        node,
        f"is typed {operands} -> {results} on axis {LAYOUT_AXES[axis_index]}, which is none of its "
        "options",
        hint="one of: " + "; ".join(map(str, options)),
    )


def _error(node: fx.Node, what: str, hint: str | None = None) -> PlacementError:
    facts = node.meta.get("autopar")
    source = facts.source if isinstance(facts, NodeInfo) else ""
    name = f"{node.name} ({node.target})" if node.op == "call_function" else node.name
    return PlacementError(f"{name} {what}", where=source or None, hint=hint)
