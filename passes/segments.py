"""Build segments: runs of blocks as modules that call the local graphs of their kinds."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import fx

from autopar.ir.errors import InputError
from autopar.ir.graph import Block, ModelGraph, Role, ValueId, activation
from autopar.ir.program import Segment


class Cut(Protocol):
    """Blocks ``[first_block, last_block]`` on a pipeline stage (a ``SegmentPlan``, for example)."""

    @property
    def stage(self) -> int: ...
    @property
    def first_block(self) -> int: ...
    @property
    def last_block(self) -> int: ...


def build_segments(
    model: ModelGraph, cuts: Sequence[Cut], kinds: Mapping[str, fx.GraphModule]
) -> tuple[Segment, ...]:
    """The segments of ``model`` that ``cuts`` describe, in order.

    Args:
        kinds: The local graph modules; segments share them.

    Raises:
        InputError: The cuts are not a partition of the blocks into runs.
    """
    _check_cuts(cuts, len(model.blocks))
    sent = _values_between(model, cuts)
    segments: list[Segment] = []
    for index, cut in enumerate(cuts):
        blocks = model.blocks[cut.first_block : cut.last_block + 1]
        received, results = sent[index], sent[index + 1]
        arguments = (*received, *_other_arguments(blocks, received))
        last = index == len(cuts) - 1
        segments.append(
            Segment(
                index=index,
                stage=cut.stage,
                blocks=tuple(block.index for block in blocks),
                module=_build_module(index, blocks, kinds, model, arguments, results),
                arguments=arguments,
                results=results,
                received=received,
                sent=() if last else results,
                parameters=tuple(value.name for value in arguments if value.role is Role.PARAMETER),
            )
        )
    return tuple(segments)


def _check_cuts(cuts: Sequence[Cut], num_blocks: int) -> None:
    expected = 0
    for index, cut in enumerate(cuts):
        if cut.first_block != expected or cut.last_block < cut.first_block:
            raise InputError(
                f"segment {index} has blocks {cut.first_block} to {cut.last_block}, "
                f"but has to start at block {expected}",
                hint="segments are runs of blocks, in order and without gaps",
            )
        expected = cut.last_block + 1
    if expected != num_blocks:
        raise InputError(f"segments cover {expected} blocks of {num_blocks}")


def _final_values(model: ModelGraph) -> tuple[ValueId, ...]:
    return (model.loss,) if model.weight is None else (model.loss, model.weight)


def _values_between(model: ModelGraph, cuts: Sequence[Cut]) -> list[tuple[ValueId, ...]]:
    """Activations that cross the start of each segment, in order of production, and the end.

    A value crosses every border between its producer and its last reader.
    """
    end = len(model.blocks)
    last_reader: dict[ValueId, int] = {}
    for block in model.blocks:
        for value in block.bindings:
            if value.role is Role.ACTIVATION:
                last_reader[value] = block.index
    last_reader.update(dict.fromkeys(_final_values(model), end))
    borders = [*(cut.first_block for cut in cuts)]
    crossing = [
        tuple(
            sorted(
                (v for v, reader in last_reader.items() if model.producer(v)[0] < border <= reader),
                key=model.producer,
            )
        )
        for border in borders
    ]
    return [*crossing, _final_values(model)]


def _other_arguments(blocks: Iterable[Block], received: tuple[ValueId, ...]) -> list[ValueId]:
    """Parameters, inputs and constants that ``blocks`` read, in order of first use."""
    bound = itertools.chain.from_iterable(block.bindings for block in blocks)
    return [value for value in dict.fromkeys(bound) if value.role is not Role.ACTIVATION]


def _build_module(
    index: int,
    blocks: Sequence[Block],
    kinds: Mapping[str, fx.GraphModule],
    model: ModelGraph,
    arguments: Sequence[ValueId],
    results: Sequence[ValueId],
) -> fx.GraphModule:
    graph = fx.Graph()
    nodes = {value: _placeholder(graph, value) for value in arguments}
    read = {value for block in blocks for value in block.bindings} | set(results)
    for block in blocks:
        bound = tuple(nodes[value] for value in block.bindings)
        called = graph.create_node("call_module", block.kind, bound, name=f"block_{block.index}")
        for output in range(len(model.kind_of(block).outputs)):
            value = activation(block.index, output)
            if value in read:
                nodes[value] = graph.call_function(operator.getitem, (called, output))
    graph.output(tuple(nodes[value] for value in results))
    used = {block.kind: kinds[block.kind] for block in blocks}
    return fx.GraphModule(used, graph, class_name=f"Segment{index}")


def _placeholder(graph: fx.Graph, value: ValueId) -> fx.Node:
    """A placeholder named after ``value``, as far as that is an identifier of its own."""
    node = graph.placeholder(f"{value.role.value}_{value.name}")
    node.target = node.name  # the graph made the name legal and unique
    return node
