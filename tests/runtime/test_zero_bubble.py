"""Backwards in two parts give the gradients of whole ones, bit by bit, with no more work (ranks are
threads).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.deferral import Deferred
from autopar.ir.mesh import Mesh
from autopar.ir.plan import RecomputeName, ScheduleName
from autopar.ir.program import bind_axes
from autopar.ir.randomness import Drawing
from autopar.runtime.host_copies import HostCopies
from autopar.runtime.offloaded_activations import Shelf
from autopar.runtime.segment_runner import SegmentRunner
from tests.models import SEQ
from tests.runtime.cases import Setup
from tests.runtime.harness import assert_parity, lowered, train_on_threads
from tests.runtime.laid_out import laid_out
from tests.runtime.test_recompute import predicted
from tests.zoo import ZOO

SETUPS = [
    Setup(name="llama", mesh=Mesh(pp=2)),
    Setup(name="llama", mesh=Mesh(pp=2, tp=2)),
    Setup(name="llama", mesh=Mesh(pp=2, tp=2), sequence=True, recompute="full"),
    Setup(name="llama", mesh=Mesh(pp=2, tp=2), sequence=True, recompute="selective_op"),
    Setup(name="gpt2", mesh=Mesh(pp=2)),  # tied over the stages
    Setup(name="gpt2", mesh=Mesh(pp=2, tp=2), recompute="blocks"),
    Setup(name="dropout", mesh=Mesh(pp=2)),
    Setup(name="dropout", mesh=Mesh(pp=2), recompute="full"),
    Setup(name="dropout", mesh=Mesh(pp=2, tp=2), kernels="eager", recompute="selective"),
    Setup(name="frozen", mesh=Mesh(pp=2)),
    Setup(name="frozen", mesh=Mesh(pp=2), recompute="full"),
    Setup(name="transformer", mesh=Mesh(pp=3)),
    Setup(name="llama", mesh=Mesh(pp=2, dp_shard=2), zero_stage=1),
    Setup(name="llama", mesh=Mesh(pp=2, dp_shard=2), zero_stage=2),
    Setup(name="transformer", mesh=Mesh(pp=2, dp_shard=2), zero_stage=2, recompute="full"),
    Setup(name="gpt2", mesh=Mesh(pp=2, dp_shard=2), zero_stage=3),
    Setup(name="llama", mesh=Mesh(pp=2, dp_shard=2), zero_stage=3, recompute="selective_layer"),
    Setup(name="llama", mesh=Mesh(pp=2, cp=2)),
    Setup(name="llama", mesh=Mesh(pp=2, dp_shard=2), zero_stage=2, precision="bf16"),
]

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "zero_bubble")
FAMILIES: list[tuple[str, Mesh, RecomputeName]] = [
    ("mixtral", Mesh(pp=2, ep=2), "none"),
    ("mixtral", Mesh(pp=2, tp=2), "full"),
    ("t5", Mesh(pp=3), "selective_op"),
    ("vit", Mesh(pp=2), "none"),
]


def with_schedule(setup: Setup, schedule: ScheduleName) -> Setup:
    return dataclasses.replace(setup, layers=3, num_micro_batches=4, schedule=schedule)


@functools.cache
def gradients_of(setup: Setup) -> list[Mapping[str, Tensor]]:
    return [outcome.gradients for outcome in train_on_threads(setup, num_steps=1)]


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, expected in one.items():
        assert torch.equal(other[name], expected), name


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_gradients_are_those_of_1f1b(setup: Setup):
    whole = gradients_of(with_schedule(setup, "1f1b"))
    parts = gradients_of(with_schedule(setup, "zero_bubble"))
    for one, other in zip(whole, parts, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize(("name", "mesh", "recompute"), FAMILIES)
def test_gradients_of_families_are_those_of_1f1b(name: str, mesh: Mesh, recompute: RecomputeName):
    """Experts that tokens travel to, values that many stages read, convolutions."""
    family = ZOO[name]
    module, batch = family.build(), family.inputs(6)
    steps = []
    for schedule in SCHEDULES:
        setup = Setup(mesh=mesh, schedule=schedule, recompute=recompute)
        case = laid_out(module, batch, setup, micro_batch_size=1, loss_fn=family.loss_fn)
        steps.append(case.step(batch))
    for (_, one, _), (_, other, _) in zip(*steps, strict=True):
        assert_equal(one, other)


VIRTUAL = [
    Setup(name="gpt2", mesh=Mesh(pp=3), recompute="full"),
    Setup(name="llama", mesh=Mesh(pp=2, dp_shard=2), zero_stage=1),
    Setup(name="llama", mesh=Mesh(pp=2, tp=2), sequence=True, extra_in_flight=1),
]


@pytest.mark.parametrize("setup", VIRTUAL, ids=str)
def test_gradients_over_virtual_stages_are_those_of_interleaved_1f1b(setup: Setup):
    setup = dataclasses.replace(
        setup, layers=4, num_micro_batches=4, modular=True, schedule="zero_bubble"
    )
    whole = dataclasses.replace(setup, schedule="interleaved", extra_in_flight=0)
    for one, other in zip(gradients_of(whole), gradients_of(setup), strict=True):
        assert_equal(one, other)


def test_a_shorter_last_micro_batch_changes_no_gradient():
    """It has a program of its own: five sequences are two, two and one."""
    family = ZOO["llama"]
    module, batch = family.build(), family.inputs(5)
    steps = []
    for schedule in SCHEDULES:
        case = laid_out(
            module, batch, Setup(mesh=Mesh(pp=2), schedule=schedule), micro_batch_size=2
        )
        steps.append(case.step(batch)[0][1])
    assert_equal(*steps)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_stage_with_nothing_but_the_loss_equals_one_device(zero_stage: int):
    """Its gradients do not wait; they are reduced with those of others that came meanwhile."""
    shard = 2 if zero_stage else 1
    mesh = Mesh(pp=5, dp_shard=shard)
    setup = Setup(
        mesh=mesh, layers=3, num_micro_batches=4, schedule="zero_bubble", zero_stage=zero_stage
    )
    assert_parity(setup, train_on_threads(setup, num_steps=2)[-1], 2)


def test_virtual_stages_of_one_block_equal_one_device():
    setup = Setup(
        mesh=Mesh(pp=2, dp_shard=2),
        layers=4,
        num_micro_batches=4,
        schedule="zero_bubble",
        zero_stage=3,
        modular=True,
    )
    assert_parity(setup, train_on_threads(setup, num_steps=2)[-1], 2)


def test_more_in_flight_changes_no_gradient():
    setup = Setup(name="gpt2", mesh=Mesh(pp=3), layers=4, num_micro_batches=4)
    expected = gradients_of(setup)[0]
    for schedule in SCHEDULES:
        other = dataclasses.replace(setup, schedule=schedule, extra_in_flight=2)
        assert_equal(expected, gradients_of(other)[0])


class Watch(TorchDispatchMode):
    """Products that are computed, and storages that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[tuple[int, ...]] = Counter()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            self.products[tuple(sorted((*left.shape, right.shape[1])))] += 1
        for tensor in pytree.tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.made.setdefault(reference.cdata, (reference, storage.nbytes()))
        return results

    def alive_bytes(self, outside: Iterable[Tensor]) -> int:
        gc.collect()
        others = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in outside}
        alive = (pair for key, pair in self.made.items() if key not in others)
        return sum(size for reference, size in alive if not reference.expired())


class Layer:
    """Forward and backward of a layer of Llama on one rank; what is between them may be away on the
    host meanwhile.
    """

    def __init__(self, recompute: RecomputeName, *, in_parts: bool, is_away: bool = False) -> None:
        program, model, plan = lowered(Setup(name="llama"))
        segment = bind_axes(program, {}).segments[1]
        schedule = dataclasses.replace(plan.schedule, recompute=recompute)
        runner = SegmentRunner(segment, model, schedule, in_parts=in_parts)
        generator = torch.Generator().manual_seed(0)
        arguments: list[Tensor] = []
        for value in segment.arguments:
            local = program.values[value]
            if value.name in model.constants:
                arguments.append(model.constants[value.name])
            else:
                tensor = torch.rand(local.shape, generator=generator)
                arguments.append(tensor.requires_grad_(local.requires_grad))
        self.tokens = plan.batch.micro_batch_size * SEQ
        numbers = Drawing(seed=0, step=0, sequences=tuple(range(plan.batch.micro_batch_size)))
        names = set(program.parameters)
        pairs = list(zip(segment.arguments, arguments, strict=True))
        self.parameters = [t for v, t in pairs if v.name in names and t.requires_grad]
        (self.given,) = (t for v, t in pairs if v in segment.received and t.requires_grad)
        self.deferred, self.watch = Deferred(), Watch()
        shelf = Shelf(arguments)
        with self.watch, shelf.hooks() if is_away else contextlib.nullcontext():
            (result,) = runner(arguments, numbers, self.deferred if in_parts else None)
        if is_away:
            copies = HostCopies(result.device)
            with self.watch:
                shelf.offload(copies)
                shelf.release()
                shelf.fetch(copies)
                shelf.wait()
        self.root: Any = torch.autograd.graph.get_gradient_edge(result)
        self.up = torch.rand(result.shape, generator=generator)
        self.outside = (*arguments, self.up)

    def backward(self) -> Counter[tuple[int, ...]]:
        """Products of the backward, or of its input part."""
        self.watch.products.clear()
        with self.watch:
            torch.autograd.backward([self.root], [self.up])
        self.root = None
        return self.watch.products.copy()

    def finish(self) -> Counter[tuple[int, ...]]:
        """Products of the weight part."""
        self.watch.products.clear()
        with self.watch:
            self.deferred.finish(self.parameters)
        return self.watch.products.copy()

    def alive_bytes(self) -> int:
        """Of all that forward and backward made, but for gradients that they were to give."""
        for tensor in (self.given, *self.parameters):
            tensor.grad = None
        return self.watch.alive_bytes(self.outside)

    def gradients(self) -> list[Tensor | None]:
        return [self.given.grad, *(parameter.grad for parameter in self.parameters)]


@pytest.mark.parametrize("recompute", ["none", "selective_op", "full"])
def test_the_parts_share_the_work_of_the_whole(recompute: RecomputeName):
    """The seven products of a layer each have one of their gradients in each part; nothing is
    computed again that is not so in a whole backward.
    """
    whole, parts = Layer(recompute, in_parts=False), Layer(recompute, in_parts=True)
    together = whole.backward()
    first = parts.backward()
    assert len(parts.deferred) == 7
    matrices = [p for p in parts.parameters if p.dim() > 1]
    assert len(matrices) == 7
    assert all(matrix.grad is None for matrix in matrices)
    assert parts.given.grad is not None
    second = parts.finish()
    assert second.total() == 7
    assert first + second == together
    for one, other in zip(whole.gradients(), parts.gradients(), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("recompute", "is_away"),
    [("none", False), ("none", True), ("selective_op", False), ("full", False)],
)
def test_between_the_parts_live_operands_and_gradients_of_products(
    recompute: RecomputeName, is_away: bool
):
    """Of a layer: what goes into q, k and v, into o, into gate and up, and into down; the gradients
    of all seven results. It is what the cost model says.
    """
    layer = Layer(recompute, in_parts=True, is_away=is_away)
    if recompute == "full":
        assert layer.alive_bytes() == 0
    layer.backward()
    operands = 64 + 64 + 64 + 128
    results = 64 + 32 + 32 + 64 + 128 + 128 + 64
    expected = 4 * layer.tokens * (operands + results)
    assert layer.alive_bytes() + layer.up.nbytes == expected
    _, model, plan = lowered(Setup(name="llama"))
    assert predicted(model, plan, recompute).waiting_bytes == expected
    layer.finish()
    assert layer.alive_bytes() == 0
