"""What typed axes send is a part of the problem of the axis after them: of every layout."""

import itertools
import operator
import random

import pytest
import torch
from torch import fx

from autopar.capture import capture
from autopar.ir.graph import BlockKind
from autopar.ir.kernels import DEFAULT_KERNELS
from autopar.ir.layout import operands_of
from autopar.ir.mesh import CONTEXT_AXIS, EXPERT_AXIS
from autopar.ir.rules.core import Option
from autopar.ir.typecheck import is_op
from autopar.solver import Cluster
from autopar.solver.candidates import Way
from autopar.solver.costs.comm import Links, group_of
from autopar.solver.costs.kernels import Kernels
from autopar.solver.layout.check import kind_costs
from autopar.solver.layout.costing import Coster
from autopar.solver.layout.decode import axis_typing
from autopar.solver.layout.make import make_problem
from autopar.solver.layout.model_facts import ModelFacts, model_facts
from autopar.solver.layout.outer import AxisTyping, OuterAxes, OuterAxis
from autopar.solver.layout.problem import Problem, Solution, Weights
from autopar.solver.layout.solve import ProblemSolver
from autopar.solver.layout.state import AxisRule
from autopar.solver.settings import make_setting
from autopar.solver.typed_axes import TypedAxes
from tests.zoo import ZOO

CLUSTER = Cluster("a100-80gb", nodes=4)
TP, BATCH = 2, 2
DEGREES = ((1, 4), (4, 1), (2, 2))
"""cp and ep."""
WAY = Way(kernels=DEFAULT_KERNELS, sequence_parallel=None, loss_parallel=True, recompute="none")


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return model_facts(capture(ZOO["mixtral"].build(), ZOO["mixtral"].inputs()))


def drawn_solutions(problem: Problem, count: int) -> list[Solution]:
    """Layouts that are best for random prices of a forward, a backward and a kept byte."""
    draw, solver, num = random.Random(0), ProblemSolver(problem=problem), len(problem.kinds)
    return [
        solver.solve(
            Weights(
                forward=tuple(draw.random() for _ in range(num)),
                backward=tuple(draw.random() for _ in range(num)),
                step=draw.choice((0.0, 1.0)),
                held=tuple(draw.choice((0.0, 1e-9, 1e-6)) for _ in range(num)),
                parameters=(0.0,) * len(problem.classes),
            )
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(("cp", "ep"), DEGREES)
def test_a_layout_costs_what_all_its_axes_send(facts: ModelFacts, cp: int, ep: int) -> None:
    """Told from the typings of all axes by a walk over the graph."""
    axes = TypedAxes(facts=facts, cluster=CLUSTER)
    group = group_of(CLUSTER, size=TP, stride=1)
    coster = Coster(Kernels(CLUSTER.hardware), Links(CLUSTER), group, BATCH)
    rule = AxisRule(name="tp", shards_parameters=True)
    comm = axes.comm(cp=cp, ep=ep, tp=TP, micro_batch_size=BATCH)
    outer = axes.outer(cp=cp, ep=ep)
    with_comm = make_problem(facts, rule, coster, outer, comm)
    without = make_problem(facts, rule, coster, outer)
    sent: dict[str, set[int]] = {name: set() for name in with_comm.kinds}
    for solution in drawn_solutions(with_comm, 20):
        wanted = walked(facts, axes, with_comm, solution, cp=cp, ep=ep)
        pairs = zip(kind_costs(with_comm, solution), kind_costs(without, solution), strict=True)
        for name, (more, less) in zip(with_comm.kinds, pairs, strict=True):
            forward, backward = wanted[name]
            assert more.forward_s - less.forward_s == pytest.approx(forward, rel=1e-9)
            assert more.backward_s - less.backward_s == pytest.approx(backward, rel=1e-9)
            assert more.forward_comm_s - less.forward_comm_s == pytest.approx(forward, rel=1e-9)
            sent[name].add(round(forward * 1e9))
    assert any(len(seconds) > 1 for seconds in sent.values()), "shards send less"


@pytest.mark.parametrize(("cp", "ep"), DEGREES)
def test_no_layout_is_faster_than_what_bounds_say(facts: ModelFacts, cp: int, ep: int) -> None:
    axes = TypedAxes(facts=facts, cluster=CLUSTER)
    setting = make_setting(
        facts,
        CLUSTER,
        axes,
        cp=cp,
        ep=ep,
        tp=TP,
        micro_batch_size=BATCH,
        reduce_itemsize=4,
        way=WAY,
    )
    least, roofline = setting.least_times("none"), setting.roofline_times("none")
    for solution in drawn_solutions(setting.problem, 20):
        costs = setting.costs(solution)
        both = costs.forward_s + costs.backward_s
        assert (roofline.both <= both * (1 + 1e-9)).all()
        assert (least.both <= both * (1 + 1e-9)).all()
        assert (both - least.forward <= costs.backward_s * (1 + 1e-9)).all()


def walked(
    facts: ModelFacts,
    axes: TypedAxes,
    problem: Problem,
    solution: Solution,
    *,
    cp: int,
    ep: int,
) -> dict[str, tuple[float, float]]:
    """Seconds forward and backward, in a block of each kind, that context and expert axis send."""
    model = facts.model
    tensor = axis_typing(model, facts.classes, problem, solution)
    typed = {
        name: OuterAxis(size=size, divides_batch=name == EXPERT_AXIS, typing=typing)
        for name, typing in axes.typings(cp=cp, ep=ep).items()
        for size in [cp if name == CONTEXT_AXIS else ep]
    }
    total = dict.fromkeys(model.kinds, (0.0, 0.0))
    for name, axis in typed.items():
        others = [other for key, other in typed.items() if key != name]
        others.append(OuterAxis(size=TP, divides_batch=False, typing=tensor))
        stride, batch = (ep * TP, BATCH) if name == CONTEXT_AXIS else (TP, BATCH * ep)
        group = group_of(CLUSTER, size=axis.size, stride=stride)
        coster = Coster(Kernels(CLUSTER.hardware), Links(CLUSTER), group, batch)
        for kind in model.kinds.values():
            forward, backward = _of_kind(kind, axis.typing, coster, OuterAxes(tuple(others)))
            total[kind.name] = (total[kind.name][0] + forward, total[kind.name][1] + backward)
    return total


def _of_kind(
    kind: BlockKind, typing: AxisTyping, coster: Coster, others: OuterAxes
) -> tuple[float, float]:
    states = typing[kind.name]
    moved: dict[tuple[fx.Node, int, object], tuple[float, float]] = {}
    helped: list[tuple[float, float]] = []
    for node in kind.graph.nodes:
        if node.op != "output" and not is_op(node):
            continue
        for operand, demanded in zip(operands_of(node), states[node.name][0], strict=True):
            given = states[operand.name][1][0]
            cost = coster.move(others.view(kind, operand).results[0], given, demanded)
            moved[(*_value(operand), demanded)] = (cost.forward_s, cost.backward_s)
        if node.target is torch.ops.autopar.routed_experts.default:
            operands, results = states[node.name]
            sends = operands[0].is_sharded and results[0].is_sharded and operands[3].is_sharded
            helper = "expert_dispatch" if sends else None
            option = Option(operands=operands, results=results, helper=helper)
            seconds = coster.op(node, others.view(kind, node), option)
            helped.append((seconds.forward_comm_s, seconds.backward_comm_s))
    pairs = list(itertools.chain(moved.values(), helped))
    return sum(forward for forward, _ in pairs), sum(backward for _, backward in pairs)


def _value(node: fx.Node) -> tuple[fx.Node, int]:
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        return source, index
    return node, 0
