"""Recomputation changes no gradient, and what it computes again is not kept."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.axis_group import AxisGroup
from autopar.ir.errors import InputError
from autopar.ir.graph import ModelGraph, Role
from autopar.ir.mesh import LAYOUT_AXES, Mesh
from autopar.ir.plan import Plan, RecomputeName, SchedulePlan
from autopar.ir.program import bind_axes
from autopar.ir.randomness import Drawing
from autopar.passes import lower_plan
from autopar.runtime.communicator import Communicator
from autopar.runtime.segment_runner import SegmentRunner
from autopar.runtime.threads import run_mesh
from autopar.solver import Cluster
from autopar.solver.candidates import Way
from autopar.solver.choose_again import Again
from autopar.solver.instance import make_instance
from autopar.solver.layout.check import kind_costs
from autopar.solver.layout.model_facts import model_facts
from autopar.solver.layout.problem import KindCost
from autopar.solver.settings import make_setting
from autopar.solver.solve import make_plan as make_solved_plan
from autopar.solver.solved import Solved
from autopar.solver.typed_axes import TypedAxes
from tests.models import HEADS, SEQ, tiny_gpt2, tiny_llama
from tests.runtime.cases import Setup, make_model
from tests.runtime.harness import lowered, train_on_threads
from tests.runtime.laid_out import laid_out

BY_NODES: tuple[RecomputeName, ...] = ("selective", "selective_op")
MODES: tuple[RecomputeName, ...] = (*BY_NODES, "selective_layer", "blocks", "full")

SETUPS = [
    Setup(name="dropout", mesh=Mesh(tp=2), zero_stage=0),
    Setup(name="dropout", mesh=Mesh(dp_shard=2), zero_stage=3, kernels="eager"),
    Setup(name="gpt2", mesh=Mesh(pp=2), kernels="eager"),  # tied over the stages
    Setup(name="llama", mesh=Mesh(dp_shard=2, tp=2), zero_stage=3, sequence=True),
    Setup(name="llama", mesh=Mesh(cp=2), kernels="eager", schedule="layered"),
]


@functools.cache
def without(setup: Setup) -> Mapping[str, Tensor]:
    """Gradients without recomputation."""
    return train_on_threads(setup, num_steps=1)[0].gradients


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_recomputation_changes_no_gradient(setup: Setup, recompute: RecomputeName) -> None:
    setup = dataclasses.replace(setup, layers=3)
    again = dataclasses.replace(setup, recompute=recompute)
    gradients = train_on_threads(again, num_steps=1)[0].gradients
    for name, expected in without(setup).items():
        assert torch.equal(gradients[name], expected), name


GATHERING = [
    Setup(name="llama", mesh=Mesh(tp=2), zero_stage=0, sequence=True),
    Setup(name="llama", mesh=Mesh(dp_shard=2, tp=2), zero_stage=3, sequence=True),
    Setup(name="dropout", mesh=Mesh(pp=2, tp=2), sequence=True, schedule="zero_bubble"),
]


@pytest.mark.parametrize("recompute", ["none", "selective_op", "blocks"])
@pytest.mark.parametrize("setup", GATHERING, ids=str)
def test_gathering_again_changes_no_gradient(setup: Setup, recompute: RecomputeName) -> None:
    setup = dataclasses.replace(setup, layers=3)
    again = dataclasses.replace(setup, recompute=recompute, gathers_again=True)
    gradients = train_on_threads(again, num_steps=1)[0].gradients
    for name, expected in without(setup).items():
        assert torch.equal(gradients[name], expected), name


class Allocations(TorchDispatchMode):
    """The storages that ops made, and those of them that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int, tuple[int, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.made.setdefault(
                    reference.cdata, (reference, storage.nbytes(), tuple(tensor.shape))
                )
        return results

    def forget(self, arguments: list[Tensor]) -> None:
        for argument in arguments:
            self.made.pop(StorageWeakRef(argument.untyped_storage()).cdata, None)

    def alive(self) -> Tensors:
        gc.collect()
        found = self.made.values()
        return [(size, shape) for reference, size, shape in found if not reference.expired()]


Tensors = list[tuple[int, tuple[int, ...]]]
"""Bytes and shape of each."""


def kept(
    program: Any, model: ModelGraph, plan: Plan, schedule: SchedulePlan, *, block: int = 1
) -> Tensors:
    """All tensors that are alive after the forward of a block, beside its arguments and results."""
    return kept_and_rebuilt(program, model, plan, schedule, block=block)[0]


def kept_and_rebuilt(
    program: Any,
    model: ModelGraph,
    plan: Plan,
    schedule: SchedulePlan,
    *,
    block: int = 1,
    groups: Mapping[str, AxisGroup] = MappingProxyType({}),
) -> tuple[Tensors, Tensors]:
    """All tensors that are alive after the forward of a block, beside its arguments and results;
    and when its backward has asked for what it computes again.
    """
    program = bind_axes(program, groups)
    segment = program.segments[block]
    runner = SegmentRunner(segment, model, schedule)
    generator = torch.Generator().manual_seed(0)
    arguments = []
    for value in segment.arguments:
        local = program.values[value]
        if value.name in model.constants:
            arguments.append(model.constants[value.name])
        else:
            tensor = torch.rand(local.shape, generator=generator).to(local.dtype)
            arguments.append(tensor.requires_grad_(local.requires_grad))
    size = plan.batch.micro_batch_size
    numbers = Drawing(seed=0, step=0, sequences=tuple(range(size)))
    with Allocations() as allocations:
        results = runner(arguments, numbers)
        allocations.forget(arguments)
        roots = [torch.autograd.graph.get_gradient_edge(r) for r in results if r.requires_grad]
        del results
        let_go(groups)
        forward = allocations.alive()
        ask_for_saved([root.node for root in roots])  # they hold what autograd keeps
        allocations.forget(arguments)
        let_go(groups)
        backward = allocations.alive()
    return forward, backward


def let_go(groups: Mapping[str, AxisGroup]) -> None:
    """Thread ranks hold what they sent each other last."""
    for group in groups.values():
        if group.size > 1:
            group.all_reduce(torch.zeros(0))


def ask_for_saved(nodes: list[Any]) -> None:
    """What backward asks for, of everything that ``nodes`` come from."""
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            for name in dir(node):
                if name.startswith("_saved_"):
                    getattr(node, name)
            nodes += [before for before, _ in node.next_functions]


def kept_by_mode(program: Any, model: ModelGraph, plan: Plan) -> Callable[[RecomputeName], Tensors]:
    def of(recompute: RecomputeName) -> Tensors:
        schedule = dataclasses.replace(plan.schedule, recompute=recompute)
        return kept(program, model, plan, schedule)

    return of


def num_bytes(tensors: Tensors) -> int:
    return sum(size for size, _ in tensors)


def num_scores(tensors: Tensors) -> int:
    """Tensors with a row of keys for every query."""
    return sum(
        len(shape) > 2 and shape[-2:] == (LONG, LONG) and shape[-3] == HEADS for _, shape in tensors
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "dropout"])
@pytest.mark.parametrize("kernels", ["eager", "flash_attention2"])
def test_the_more_is_recomputed_the_less_is_kept(name: str, kernels: str) -> None:
    of = kept_by_mode(*lowered(Setup(name=name, kernels=kernels)))
    none, by_op, full = (num_bytes(of(m)) for m in ("none", "selective_op", "full"))
    assert none > num_bytes(of("selective"))
    assert none > 1.3 * by_op
    assert by_op > full == 0


@pytest.mark.parametrize("recompute", BY_NODES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_costs_know_what_is_kept_and_what_is_rebuilt(name: str, recompute: RecomputeName) -> None:
    program, model, plan = lowered(Setup(name=name))
    schedule = dataclasses.replace(plan.schedule, recompute=recompute)
    forward, backward = map(num_bytes, kept_and_rebuilt(program, model, plan, schedule))
    cost = predicted(model, plan, recompute)
    inputs = sum(
        4 * math.prod(program.values[value].shape)
        for value in program.segments[1].arguments
        if value.role is Role.ACTIVATION
    )
    row_sums = 4 * plan.batch.micro_batch_size * HEADS * SEQ  # costs leave them out
    assert cost.held_bytes <= forward + inputs <= cost.held_bytes + 2 * row_sums
    assert cost.rebuilt_bytes <= backward - forward <= cost.rebuilt_bytes + 2 * row_sums


@functools.cache
def on_tensor_ranks() -> tuple[Any, Plan, Solved]:
    """A plan of a GPT-2 whose tensor ranks share the positions between blocks."""
    setup = Setup(name="gpt2", layers=3)
    model, training = make_model("gpt2", 3, setup.precision), lowered(setup)[2].training
    instance = make_instance(
        model,
        Cluster("cpu-local", gpus_per_node=4),
        global_batch_size=8,
        training=training,
        pin={"tp": 2, "pp": 1, "sequence_parallel": 1, "micro_batch_size": 2, "zero_stage": 1},
    )
    result = instance.search.run(instance.candidates)
    assert result.best is not None
    plan = make_solved_plan(instance, result, solve_s=0.0)
    return lower_plan(model, plan), plan, result.best


@pytest.mark.parametrize("by_op", [False, True])
def test_costs_know_what_is_kept_by_blocks_that_gather_again(by_op: bool) -> None:
    program, plan, solved = on_tensor_ranks()
    model = solved.setting.facts.model
    again = Again(by_op=frozenset({1} if by_op else ()), gathers=frozenset({1}))
    candidate = again.of(solved.candidate)
    schedule = dataclasses.replace(
        plan.schedule,
        recompute=candidate.recompute,
        recomputed_by_op=candidate.recomputed_by_op,
        gathered_again=candidate.gathered_again,
    )

    def measured(communicator: Communicator) -> tuple[int, int]:
        groups = {axis: communicator.group(axis) for axis in LAYOUT_AXES}
        found = kept_and_rebuilt(program, model, plan, schedule, groups=groups)
        return num_bytes(found[0]), num_bytes(found[1])

    stager = dataclasses.replace(solved.stager, candidate=candidate)
    held, rebuilt = float(stager.held_bytes()[1]), float(stager.rebuilt_bytes()[1])
    whole = dataclasses.replace(candidate, gathered_again=())
    assert dataclasses.replace(stager, candidate=whole).held_bytes()[1] > held
    inputs = sum(
        4 * math.prod(program.values[value].shape)
        for value in program.segments[1].arguments
        if value.role is Role.ACTIVATION
    )
    row_sums = 4 * plan.batch.micro_batch_size * HEADS * SEQ  # costs leave them out
    for forward, backward in run_mesh(plan.device_mesh(), measured):
        assert held <= forward + inputs <= held + 2 * row_sums
        assert rebuilt <= backward - forward <= rebuilt + 2 * row_sums


@pytest.mark.parametrize("kernels", ["fused norms", "fused pointwise"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_costs_know_what_fused_chains_keep(name: str, kernels: str) -> None:
    _, model, plan = lowered(Setup(name=name))
    schedule = dataclasses.replace(plan.schedule, kernels=f"flash_attention2 + {kernels}")
    plan = dataclasses.replace(plan, schedule=schedule)
    program = lower_plan(model, plan)
    cost = predicted(model, plan, "none")
    inputs = sum(
        4 * math.prod(program.values[value].shape)
        for value in program.segments[1].arguments
        if value.role is Role.ACTIVATION
    )
    row_sums = 4 * plan.batch.micro_batch_size * HEADS * SEQ  # costs leave them out
    forward = num_bytes(kept(program, model, plan, schedule))
    assert cost.held_bytes <= forward + inputs <= cost.held_bytes + 2 * row_sums


def predicted(model: ModelGraph, plan: Plan, recompute: RecomputeName) -> KindCost:
    """Of a layer, by the cost model, without tensor ranks."""
    cluster, facts = Cluster("cpu-local"), model_facts(model)
    setting = make_setting(
        facts,
        cluster,
        TypedAxes(facts=facts, cluster=cluster),
        cp=1,
        ep=1,
        tp=1,
        micro_batch_size=plan.batch.micro_batch_size,
        reduce_itemsize=4,
        way=Way(
            kernels=plan.schedule.kernels,
            sequence_parallel=None,
            loss_parallel=True,
            recompute=recompute,
        ),
    )
    costs = kind_costs(setting.problem, setting.solution("none"))
    return costs[setting.problem.kinds.index(model.blocks[1].kind)]


LONG = 2 * SEQ
"""Positions; more than a head has features, so that scores are known by their shape."""


@pytest.mark.parametrize("written", ["one op", "several ops"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "dropout"])
def test_selective_keeps_no_scores(name: str, written: str) -> None:
    if name == "llama":
        module, batch = tiny_llama(seq=LONG)
    else:
        module, batch = tiny_gpt2(seq=LONG, dropout=0.2 if name == "dropout" else 0.0)
    if written == "several ops":
        module.set_attn_implementation("eager")  # type: ignore[operator]
    setup = Setup(name=name, kernels="eager")
    case = laid_out(module, batch, setup, micro_batch_size=2)
    schedule = dataclasses.replace(case.plan.schedule, kernels="eager")
    plan = dataclasses.replace(case.plan, schedule=schedule)
    of = kept_by_mode(lower_plan(case.model, plan), case.model, plan)
    assert num_scores(of("none")) > 0
    assert num_scores(of("selective")) == 0


def test_selective_op_keeps_results_of_products_only() -> None:
    """Of a layer of Llama: q, k, v, attention's result with its row sums, o, gate and up; not
    ``down``, whose result backward does not need.
    """
    program, model, plan = lowered(Setup(name="llama"))
    schedule = dataclasses.replace(plan.schedule, recompute="selective_op")
    found = kept(program, model, plan, schedule)
    tokens = plan.batch.micro_batch_size * SEQ
    floats = tokens * (64 + 32 + 32 + 64 + HEADS + 64 + 128 + 128)
    assert num_bytes(found) == 4 * floats


def test_kernels_that_nothing_runs_are_refused() -> None:
    program, model, plan = lowered(Setup(name="llama"))
    for kernels in ("fused_softmax", "flash_attention1", "flash_attention1 + fused norms"):
        schedule = dataclasses.replace(plan.schedule, kernels=kernels)
        with pytest.raises(InputError, match="cannot be run: it is an estimate"):
            lower_plan(model, dataclasses.replace(plan, schedule=schedule))
    assert program.rest is None


def test_backward_twice_finds_the_same() -> None:
    """``retain_graph`` asks for what was computed again once more."""
    program, model, plan = lowered(Setup(name="dropout"))
    segment = bind_axes(program, {}).segments[1]
    schedule = dataclasses.replace(plan.schedule, recompute="selective_op")
    arguments = [torch.rand(program.values[v].shape).requires_grad_() for v in segment.arguments]
    numbers = Drawing(seed=0, step=0, sequences=tuple(range(plan.batch.micro_batch_size)))
    (result,) = SegmentRunner(segment, model, schedule)(arguments, numbers)
    first = torch.autograd.grad(result.sum(), arguments, retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(result.sum(), arguments, allow_unused=True)
    for one, other in zip(first, second, strict=True):
        assert one is None or torch.equal(one, other)
