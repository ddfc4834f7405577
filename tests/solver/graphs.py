"""Small models for the solver's tests, built by hand: no capture, a handful of ops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import fx

from autopar.ir.graph import (
    BATCH,
    Block,
    BlockKind,
    LossKind,
    ModelGraph,
    NodeInfo,
    Parameter,
    Role,
    Size,
    TensorInfo,
    ValueId,
    activation,
    set_info,
)
from autopar.solver.costs.comm import Links, group_of
from autopar.solver.costs.kernels import Kernels
from autopar.solver.hardware import Cluster
from autopar.solver.layout.costing import Coster
from autopar.solver.layout.make import make_problem
from autopar.solver.layout.model_facts import model_facts
from autopar.solver.layout.problem import Problem, Weights
from autopar.solver.layout.state import AxisRule
from tests.solver.layouts import KindLayouts, kind_layouts

SEQ, HIDDEN = 8, 16
aten = torch.ops.aten


def tensor_info(*shape: Size, grad: bool = True) -> TensorInfo:
    return TensorInfo(shape=shape, dtype=torch.float32, requires_grad=grad)


def block_model(*bodies: Sequence[tuple[str, int]], num_blocks: int = 2) -> ModelGraph:
    """A model of blocks that take their bodies in turn, and a last one that sums up.

    Each step of a body is an op and the index of the earlier value (0 is the block's input) that it
    reads beside the latest one: ``linear`` and ``relu`` read only the latest.
    """
    hidden = tensor_info(BATCH, SEQ, HIDDEN)
    alone = len(bodies) == 1
    names = ["body" if alone else f"body{number}" for number in range(len(bodies))]
    kinds = {
        "first": _first_kind(hidden),
        **{name: _body_kind(name, body) for name, body in zip(names, bodies, strict=True)},
        "last": _last_kind(hidden),
    }
    blocks = [_block(0, "first", [ValueId(Role.INPUT, "x"), ValueId(Role.PARAMETER, "w")])]
    parameters = {"w": _parameter("w")}
    for index in range(1, num_blocks + 1):
        name = names[(index - 1) % len(names)]
        num_weights = kinds[name].roles.count(Role.PARAMETER)
        weights = [f"{index}.w{i}" for i in range(num_weights)]
        parameters |= {weight: _parameter(weight) for weight in weights}
        bound = [ValueId(Role.PARAMETER, weight) for weight in weights]
        blocks.append(_block(index, name, [activation(index - 1, 0), *bound]))
    blocks.append(_block(num_blocks + 1, "last", [activation(num_blocks, 0)]))
    used = {block.kind for block in blocks}
    return ModelGraph(
        name="small",
        blocks=tuple(blocks),
        kinds={name: kind for name, kind in kinds.items() if name in used},
        parameters=parameters,
        inputs={"x": tensor_info(BATCH, SEQ, HIDDEN, grad=False)},
        constants={},
        loss=activation(num_blocks + 1, 0),
        weight=None,
        loss_kind=LossKind.MICRO_BATCH_MEAN,
        compute_dtype=torch.float32,
        fingerprint="small",
    )


def _body_kind(name: str, steps: Sequence[tuple[str, int]]) -> BlockKind:
    graph = fx.Graph()
    hidden = tensor_info(BATCH, SEQ, HIDDEN)
    x = _placeholder(graph, "x", hidden)
    num_weights = sum(name == "linear" for name, _ in steps)
    weight_info = tensor_info(HIDDEN, HIDDEN)
    weights = iter([_placeholder(graph, f"w{i}", weight_info) for i in range(num_weights)])
    values = [x]
    for op, other in steps:
        if op == "linear":
            made = graph.call_function(aten.linear.default, (values[-1], next(weights)))
        elif op == "relu":
            made = graph.call_function(aten.relu.default, (values[-1],))
        else:
            target = {"add": aten.add.Tensor, "mul": aten.mul.Tensor}[op]
            made = graph.call_function(target, (values[-1], values[other % len(values)]))
        set_info(made, NodeInfo(tensors=(hidden,)))
        values.append(made)
    graph.output((values[-1],))
    return BlockKind(
        name=name, graph=graph, roles=(Role.ACTIVATION, *[Role.PARAMETER] * num_weights)
    )


def _first_kind(hidden: TensorInfo) -> BlockKind:
    graph = fx.Graph()
    x = _placeholder(graph, "x", tensor_info(BATCH, SEQ, HIDDEN, grad=False))
    w = _placeholder(graph, "w", tensor_info(HIDDEN, HIDDEN))
    made = graph.call_function(aten.linear.default, (x, w))
    set_info(made, NodeInfo(tensors=(hidden,)))
    graph.output((made,))
    return BlockKind(name="first", graph=graph, roles=(Role.INPUT, Role.PARAMETER))


def _last_kind(hidden: TensorInfo) -> BlockKind:
    graph = fx.Graph()
    x = _placeholder(graph, "x", hidden)
    made = graph.call_function(aten.sum.default, (x,))
    set_info(made, NodeInfo(tensors=(tensor_info(),)))
    graph.output((made,))
    return BlockKind(name="last", graph=graph, roles=(Role.ACTIVATION,))


def _placeholder(graph: fx.Graph, name: str, info: TensorInfo) -> fx.Node:
    node = graph.placeholder(name)
    set_info(node, NodeInfo(tensors=(info,)))
    return node


def _block(index: int, kind: str, bindings: Sequence[ValueId]) -> Block:
    return Block(index=index, kind=kind, path=f"b.{index}", bindings=tuple(bindings))


def _parameter(name: str) -> Parameter:
    return Parameter(
        name=name,
        names=(name,),
        shape=(HIDDEN, HIDDEN),
        dtype=torch.float32,
        requires_grad=True,
    )


def tensor_problem(model: ModelGraph, tp: int = 2, batch: int = 2) -> Problem:
    """The problem of a tensor axis on local CPU ranks."""
    cluster = Cluster("cpu-local")
    coster = Coster(
        Kernels(cluster.hardware), Links(cluster), group_of(cluster, size=tp, stride=1), batch
    )
    axis = AxisRule(name="tp", shards_parameters=True, idle=tp == 1)
    return make_problem(model_facts(model), axis, coster)


def time_weights(problem: Problem, *, held: float = 0.0, step: float = 0.5) -> Weights:
    """Seconds of all blocks, forward and backward, and reductions of every second micro-batch."""
    counts = tuple(map(float, problem.counts))
    return Weights(
        forward=counts,
        backward=counts,
        step=step,
        held=tuple(held * count for count in counts),
        parameters=(0.0,) * len(problem.classes),
    )


def brute_force(problem: Problem, weights: Weights) -> float:
    """The least objective over every combination of options and states, by enumeration.

    Once the states of all classes are fixed, kinds do not touch each other: each is the least of
    its rows with these states.
    """
    best = math.inf
    kinds = [kind_layouts(problem, kind) for kind in range(len(problem.kinds))]
    for states in itertools.product(*(range(len(c.states) or 1) for c in problem.classes)):
        total = sum(
            weights.step * found.step_s[state]
            for found, state in zip(problem.classes, states, strict=True)
            if found.states
        )
        for kind, found in enumerate(kinds):
            total += cheapest(found, weights, kind, states)
            if total >= best:
                break
        best = min(best, total)
    return best


def cheapest(
    found: KindLayouts, weights: Weights, kind: int, states: Sequence[int] | None = None
) -> float:
    """The least of one kind, where classes have these states, or any."""
    costs = found.seconds[:, :2] @ (weights.forward[kind], weights.backward[kind])
    costs = costs + weights.held[kind] * found.num_bytes[:, 0]
    if states is not None:
        costs = costs[(found.states == [states[number] for number in found.classes]).all(axis=1)]
    return float(costs.min(initial=math.inf))
