"""The prover: runs an op shard by shard under each of its options and compares with the whole op.

Values and gradients have to be those of the op in float64, where each operand's gradient is in the
dual state of the operand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.errors import PlacementError
from autopar.ir.graph import NodeInfo, Size, TensorInfo, info, set_info
from autopar.ir.layout import operands_of
from autopar.ir.mesh import DATA_AXIS, LAYOUT_AXES, TENSOR_AXIS
from autopar.ir.moves import assemble, take_shard
from autopar.ir.placement import REPLICATED, Placement, StateKind, local_shape
from autopar.ir.program import AXIS_HANDLE
from autopar.ir.randomness import Drawing, drawing
from autopar.ir.rules.core import Option, Rule, block_patterns, options_of
from autopar.ir.rules.local import localize_node, require_compatible
from autopar.ir.rules.registry import rule_or_replicated
from autopar.ir.typecheck import placement_error, shared_factors_error
from autopar.runtime.threads import run_ranks, thread_groups

_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A call of an op on real tensors. Floating operands have gradients."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleNode:
    """A sample as a node of a graph, with the values of its operands and results."""

    graph: fx.Graph
    node: fx.Node
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


def sample_node(sample: Sample) -> SampleNode:
    """The graph of one sample: placeholders, the node, and its facts."""
    graph = fx.Graph()
    values: dict[fx.Node, Tensor] = {}

    def placeholder(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            node = graph.placeholder(f"operand_{len(values)}")
            values[node] = argument.detach().requires_grad_(argument.is_floating_point())
            set_info(node, NodeInfo(tensors=(_facts(values[node]),)))
            return node
        if isinstance(argument, list | tuple):
            return [placeholder(item) for item in argument]
        return argument

    args = tuple(map(placeholder, sample.args))
    kwargs = {name: placeholder(value) for name, value in sample.kwargs.items()}
    node = graph.call_function(sample.target, args, kwargs)
    results = _run(graph, node, tuple(values.values()), {})
    set_info(node, NodeInfo(tensors=tuple(map(_facts, results)), is_tuple=_is_tuple(sample)))
    operands = tuple(values[operand] for operand in operands_of(node))
    whole = SampleNode(graph=graph, node=node, operands=operands, results=results)
    # ops that draw random numbers have a local form of their own even where they are whole
    local_graph, local = _localized(whole, {}, [tuple(result.shape) for result in results])
    return replace(whole, results=_run(local_graph, local, operands, {}))


def _is_tuple(sample: Sample) -> bool:
    returns = getattr(getattr(sample.target, "_schema", None), "returns", None)
    if returns is None:
        return True  # functions of autopar.ir.functional that rules know return tuples
    return len(returns) > 1 or "[]" in str(returns[0].type) or "List" in str(returns[0].type)


def _facts(tensor: Tensor) -> TensorInfo:
    shape: tuple[Size, ...] = tuple(tensor.shape)
    return TensorInfo(shape=shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)


def node_options(node: fx.Node, rule: Rule, axis_size: int) -> tuple[Option, ...]:
    """All options of a sample's node on an axis."""
    return options_of(
        rule,
        [info(operand).tensor for operand in operands_of(node)],
        info(node).tensors,
        axis_size=axis_size,
        batch=1,
        patterns=block_patterns([rule]),
    )


def prove(sample: Sample, axis_size: int, rule: Rule | None = None) -> int:
    """Try every option on an axis; the number of options that were.

    Raises:
        AssertionError: An option is wrong; the message names it.
    """
    whole = sample_node(sample)
    rule = rule or rule_or_replicated(whole.node)
    options = node_options(whole.node, rule, axis_size)
    for option in options:
        prove_options(whole, {"tp": option}, {"tp": axis_size})
    return len(options)


def prove_jointly(sample: Sample, sizes: tuple[int, int]) -> int:
    """Try every pair of options on two axes that can be had together; the number of pairs."""
    whole = sample_node(sample)
    rule = rule_or_replicated(whole.node)
    axes: dict[str, int] = dict(zip((DATA_AXIS, TENSOR_AXIS), sizes, strict=True))
    tried = 0
    for pair in itertools.product(*(node_options(whole.node, rule, size) for size in sizes)):
        options = dict(zip(axes, pair, strict=True))
        if _compatible(whole, options, axes, rule):
            prove_options(whole, options, axes)
            tried += 1
    return tried


def _compatible(
    whole: SampleNode, options: Mapping[str, Option], axes: Mapping[str, int], rule: Rule
) -> bool:
    operands, results = _placements(options)
    facts = [info(operand).tensor for operand in operands_of(whole.node)]
    pairs = zip((*operands, *results), (*facts, *info(whole.node).tensors), strict=True)
    degrees = {axis: axes.get(axis, 1) for axis in LAYOUT_AXES}
    for given, tensor in pairs:
        states = dict(zip(options, given, strict=True))
        placement = tuple(states.get(axis, REPLICATED) for axis in LAYOUT_AXES)
        if placement_error(placement, tensor, degrees=degrees, batch=1):
            return False
    if shared_factors_error(rule, options, degrees=degrees, batch=1):
        return False
    try:
        require_compatible(whole.node, options)
    except PlacementError:
        return False
    return True


def _placements(options: Mapping[str, Option]) -> tuple[list[Placement], list[Placement]]:
    """Placements of operands and of results, from the options on the axes, outermost first."""
    operands = zip(*(option.operands for option in options.values()), strict=True)
    results = zip(*(option.results for option in options.values()), strict=True)
    return list(operands), list(results)


def prove_options(
    whole: SampleNode, options: Mapping[str, Option], axes: Mapping[str, int]
) -> None:
    """Run one typing on ranks; raise ``AssertionError`` unless value and gradients are right."""
    text = f"{whole.node.target} under " + "; ".join(f"{a}: {o}" for a, o in options.items())
    sizes = tuple(axes.values())
    generator = torch.Generator().manual_seed(0)
    operand_placements, result_placements = _placements(options)

    seeds = [torch.randn(r.shape, generator=generator, dtype=r.dtype) for r in _graded(whole)]
    expected = _gradients(_graded(whole), whole.operands, seeds)

    shards = [
        distribute(operand, placement, sizes, generator)
        for operand, placement in zip(whole.operands, operand_placements, strict=True)
    ]
    graded = [index for index, r in enumerate(whole.results) if r.requires_grad]
    seed_shards = [
        distribute(seed, _dual(result_placements[index]), sizes, generator)
        for index, seed in zip(graded, seeds, strict=True)
    ]
    shapes = [
        local_shape(tensor.shape, placement, sizes)
        for tensor, placement in zip(whole.results, result_placements, strict=True)
    ]
    groups = _rank_groups(axes)

    def run(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        local = [_leaf(shards[index][rank], tensor) for index, tensor in enumerate(whole.operands)]
        graph, node = _localized(whole, options, shapes)
        results = _run(graph, node, local, groups[rank])
        cotangents = [shard[rank] for shard in seed_shards]
        grads = _gradients([results[index] for index in graded], local, cotangents)
        return [result.detach() for result in results], grads

    num_ranks = len(groups)
    outcomes = (
        run_ranks(num_ranks, run) if _communicates(options) else list(map(run, range(num_ranks)))
    )
    for index, result in enumerate(whole.results):
        parts = [outcome[0][index] for outcome in outcomes]
        assert all(part.shape == torch.Size(shapes[index]) for part in parts), (
            f"{text}: shape of result {index}"
        )
        _compare(collect(parts, result_placements[index], sizes), result, f"{text}: result {index}")
    for index, gradient in enumerate(expected):
        if whole.operands[index].requires_grad:
            parts = [outcome[1][index] for outcome in outcomes]
            found = collect(parts, _dual(operand_placements[index]), sizes)
            _compare(found, gradient, f"{text}: gradient of operand {index}")


def _communicates(options: Mapping[str, Option]) -> bool:
    return any(option.helper is not None for option in options.values())


def _graded(whole: SampleNode) -> list[Tensor]:
    return [result for result in whole.results if result.requires_grad]


def _gradients(
    results: Sequence[Tensor], operands: Sequence[Tensor], seeds: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of all operands; zeros where there is none."""
    wanted = [operand for operand in operands if operand.requires_grad]
    pairs = [(r, seed) for r, seed in zip(results, seeds, strict=True) if r.requires_grad]
    if not wanted or not pairs:
        return [torch.zeros_like(operand) for operand in operands]
    found = iter(
        torch.autograd.grad(
            [result for result, _ in pairs],
            wanted,
            [seed for _, seed in pairs],
            allow_unused=True,
            retain_graph=True,
        )
    )
    grads: list[Tensor] = []
    for operand in operands:
        gradient = next(found) if operand.requires_grad else None
        grads.append(torch.zeros_like(operand) if gradient is None else gradient)
    return grads


def _leaf(shard: Tensor, whole: Tensor) -> Tensor:
    return shard.detach().clone().requires_grad_(whole.requires_grad)


def _localized(
    whole: SampleNode, options: Mapping[str, Option], shapes: Sequence[tuple[int, ...]]
) -> tuple[fx.Graph, fx.Node]:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in whole.graph.nodes:
        copies[node] = graph.node_copy(node, lambda used: copies[used])
    node = copies[whole.node]
    localize_node(graph, node, options, shapes)
    return graph, node


def _run(
    graph: fx.Graph,
    node: fx.Node,
    operands: Sequence[Tensor],
    groups: Mapping[str, Any],
) -> tuple[Tensor, ...]:
    """The results of ``node``; ``operands`` are the values of the placeholders, in order."""
    remaining = iter(operands)
    values: dict[fx.Node, Any] = {}
    for other in graph.nodes:
        if other.op == "placeholder":
            values[other] = next(remaining)
        elif other.op == "get_attr":
            values[other] = groups[str(other.target)]
    args = fx.map_arg(node.args, lambda used: values[used])
    kwargs = fx.map_arg(node.kwargs, lambda used: values[used])
    assert callable(node.target)
    with drawing(Drawing(seed=0, step=0, sequences=())):
        found = node.target(*args, **kwargs)
    return tuple(found) if isinstance(found, list | tuple) else (found,)


def _rank_groups(axes: Mapping[str, int]) -> list[dict[str, Any]]:
    """For each rank (the last axis fastest), its group on each axis, by the name of the handle."""
    names, sizes = list(axes), list(axes.values())
    coordinates = list(itertools.product(*(range(size) for size in sizes)))
    groups: list[dict[str, Any]] = [{} for _ in coordinates]
    for position, name in enumerate(names):
        made: dict[tuple[int, ...], Any] = {}
        for rank, at in enumerate(coordinates):
            others = (*at[:position], *at[position + 1 :])
            if others not in made:
                made[others] = thread_groups(name, sizes[position])
            groups[rank][AXIS_HANDLE.format(name)] = made[others][at[position]]
    return groups


def _dual(placement: Placement) -> Placement:
    return tuple(state.dual() for state in placement)


def distribute(
    tensor: Tensor, placement: Placement, sizes: Sequence[int], generator: torch.Generator
) -> list[Tensor]:
    """What each rank (the last axis fastest) holds of ``tensor``."""
    tensor = tensor.detach()
    if not placement:
        return [tensor]
    state, size = placement[0], sizes[0]
    rest = (placement[1:], sizes[1:], generator)
    if state.is_whole:
        return distribute(tensor, *rest) * size
    if state.is_sharded:
        shards = [take_shard(tensor, state, rank, size) for rank in range(size)]
    else:
        shards = list(_terms(tensor, size, generator))
    return [part for shard in shards for part in distribute(shard, *rest)]


def _terms(tensor: Tensor, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Random tensors whose sum is ``tensor``."""
    rest = tensor
    for _ in range(count - 1):
        if tensor.is_floating_point():
            term = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        elif tensor.dtype == torch.bool:
            term = torch.zeros_like(tensor)
        else:
            term = torch.randint(-3, 3, tensor.shape, generator=generator, dtype=tensor.dtype)
        yield term
        rest = rest if tensor.dtype == torch.bool else rest - term
    yield rest


def collect(parts: Sequence[Tensor], placement: Placement, sizes: Sequence[int]) -> Tensor:
    """The whole tensor from what each rank holds; raises where replicas differ."""
    if not placement:
        (part,) = parts
        return part
    state, size = placement[0], sizes[0]
    share = len(parts) // size
    inner = [
        collect(parts[start : start + share], placement[1:], sizes[1:])
        for start in range(0, len(parts), share)
    ]
    if state.is_whole:
        for other in inner[1:]:
            _compare(other, inner[0], f"replicas in state {state}")
        return inner[0]
    if state.is_sharded:
        return assemble(inner, state)
    assert state.kind is StateKind.PARTIAL
    return torch.stack(inner).sum(0).to(inner[0].dtype)


def _compare(found: Tensor, expected: Tensor, what: str) -> None:
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} ≠ {tuple(expected.shape)}"
    if expected.is_floating_point() or expected.is_complex():
        right = torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
    else:
        right = torch.equal(found, expected)
    assert right, f"{what} is wrong"
