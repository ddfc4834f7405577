"""The prover: runs an op shard by shard under each of its options and compares with the whole op.

Values and gradients have to be those of the op, where each operand's gradient is in the dual state
of the operand. Ranks are threads of this process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.errors import PlacementError
from autopar.ir.graph import NodeInfo, Size, TensorInfo, info, set_info
from autopar.ir.layout import operands_of
from autopar.ir.mesh import DATA_AXIS, LAYOUT_AXES, TENSOR_AXIS
from autopar.ir.placement import REPLICATED, Placement, local_shape
from autopar.ir.program import AXIS_HANDLE
from autopar.ir.randomness import Drawing, drawing
from autopar.ir.rules.core import Option, Rule, block_patterns, options_of
from autopar.ir.rules.local import localize_node, require_compatible
from autopar.ir.rules.registry import rule_or_replicated
from autopar.ir.typecheck import placement_error, shared_factors_error
from autopar.runtime.threads import run_ranks, thread_groups
from autopar.testing.shards import collect, compare, distribute, random_like, tolerance_of


@dataclass(frozen=True, slots=True)
class Fixed:
    """A tensor among the arguments of a sample that gets no gradient."""

    tensor: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A call of an op on real tensors. Floating operands have gradients, unless ``Fixed``."""

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
        if isinstance(argument, Tensor | Fixed):
            tensor = argument.tensor if isinstance(argument, Fixed) else argument
            graded = tensor is argument and (tensor.is_floating_point() or tensor.is_complex())
            node = graph.placeholder(f"operand_{len(values)}")
            values[node] = tensor.detach().requires_grad_(graded)
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
    text = f"{whole.node.target}, " + " and ".join(
        _described(option, axis, axes[axis]) for axis, option in options.items()
    )
    sizes = tuple(axes.values())
    generator = torch.Generator().manual_seed(0)
    operand_placements, result_placements = _placements(options)

    seeds = [random_like(result, generator) for result in _graded(whole)]
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
    tolerance = tolerance_of((*whole.operands, *whole.results))

    def run(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        local = [_leaf(shards[index][rank], tensor) for index, tensor in enumerate(whole.operands)]
        graph, node = _localized(whole, options, shapes)
        try:
            results = _run(graph, node, local, groups[rank])
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise AssertionError(f"{text}: the op refuses its shards: {error}") from error
        for index, result in enumerate(results):
            assert result.shape == torch.Size(shapes[index]), (
                f"{text}: result {index} has the shape {tuple(result.shape)} on a rank, "
                f"not {shapes[index]}"
            )
        cotangents = [shard[rank] for shard in seed_shards]
        grads = _gradients([results[index] for index in graded], local, cotangents)
        return [result.detach() for result in results], grads

    num_ranks = len(groups)
    outcomes = (
        run_ranks(num_ranks, run) if _communicates(options) else list(map(run, range(num_ranks)))
    )
    for index, result in enumerate(whole.results):
        parts = [outcome[0][index] for outcome in outcomes]
        what = f"{text}: result {index}"
        compare(
            _collected(parts, result_placements[index], sizes, what, tolerance),
            result,
            what,
            tolerance,
        )
    for index, gradient in enumerate(expected):
        if whole.operands[index].requires_grad:
            parts = [outcome[1][index] for outcome in outcomes]
            what = f"{text}: the gradient of operand {index}"
            found = _collected(parts, _dual(operand_placements[index]), sizes, what, tolerance)
            compare(found, gradient, what, tolerance)


def _described(option: Option, axis: str, size: int) -> str:
    split = "no factor split" if option.factor is None else f"factor {option.factor} split"
    return f"{split} over {size} ranks of axis {axis} ({option})"


def _collected(
    parts: Sequence[Tensor],
    placement: Placement,
    sizes: Sequence[int],
    what: str,
    tolerance: float,
) -> Tensor:
    try:
        return collect(parts, placement, sizes, tolerance)
    except (AssertionError, RuntimeError) as error:
        raise AssertionError(f"{what}: {error}") from error


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
