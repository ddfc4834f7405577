"""What forwards keep on the host comes back bit for bit, and is not on the device meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.ir.offload import ACTIVATION_BUFFERS
from autopar.runtime.communicator import Communicator
from autopar.runtime.host_copies import HostCopies
from autopar.runtime.offloaded_activations import OffloadedActivations, Shelf
from autopar.runtime.threads import run_mesh
from autopar.solver import Cluster
from autopar.solver.instance import make_instance
from tests.runtime.cases import GLOBAL_BATCH, Setup, make_batch, make_model, make_plan
from tests.runtime.harness import make_engine, train_on_threads
from tests.runtime.test_engine import make_engine_once

SETUPS = [
    Setup(**{"layers": 3, "offloaded_blocks": blocks, **fields})  # type: ignore[arg-type]
    for blocks, fields in (
        ((0, 1, 2), {"name": "dropout"}),
        ((1, 3), {"name": "llama", "mesh": Mesh(pp=2), "num_micro_batches": 4}),
        ((1, 2), {"name": "llama", "mesh": Mesh(dp_shard=2), "zero_stage": 3}),
        ((0, 2), {"name": "gpt2", "mesh": Mesh(tp=2), "schedule": "layered"}),
        ((0, 3), {"name": "gpt2", "mesh": Mesh(dp_shard=2), "recompute": "blocks"}),
        ((1, 2), {"name": "frozen", "precision": "bf16"}),
        ((1, 2, 3), {"name": "llama", "mesh": Mesh(pp=2), "schedule": "zero_bubble"}),
        (
            (0, 1, 2, 3),
            {"layers": 4, "mesh": Mesh(pp=2), "schedule": "interleaved", "modular": True},
        ),
    )
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_offloaded_activations_change_no_bit(setup: Setup) -> None:
    away = train_on_threads(setup, 1)
    here = train_on_threads(dataclasses.replace(setup, offloaded_blocks=()), 1)
    for one, other in zip(away, here, strict=True):
        assert [r.loss for r in one.results] == [r.loss for r in other.results]
        for name, expected in other.gradients.items():
            assert one.gradients[name].equal(expected), name


def test_a_storage_is_copied_once_and_what_was_given_is_not() -> None:
    """Of a weight, and a storage of which two views are saved; a view comes back as one."""
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(3, 4)
    shelf = Shelf([weight, x])
    with shelf.hooks():
        both = x @ weight
        left, right = both[:, :2], both[:, 2:]
        loss = (left.sin() * right.cos()).sum()
    kept = 3 * 4 * 4 + 2 * 3 * 2 * 4  # both, and the operands of the product
    assert shelf.num_bytes == kept
    copies = HostCopies(torch.device("cpu"))
    shelf.offload(copies)
    shelf.release()
    with torch.no_grad():  # nothing of it is needed any more
        both.zero_()
    shelf.fetch(copies)
    assert shelf.num_bytes == kept
    shelf.wait()
    (gradient,) = torch.autograd.grad(loss, weight)
    again = x @ weight
    (expected,) = torch.autograd.grad((again[:, :2].sin() * again[:, 2:].cos()).sum(), weight)
    assert gradient.equal(expected)


def test_parameters_are_never_copied_and_activations_leave_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a step of ZeRO 3, whose gathered parameters come and go."""
    setup = Setup(
        layers=3, mesh=Mesh(dp_shard=2), zero_stage=3, offloaded_blocks=(0, 1, 2, 3), name="llama"
    )
    make_engine_once(setup)
    sizes: dict[int, list[int]] = {}
    most: dict[int, int] = {}
    offload, wait = OffloadedActivations.offload, OffloadedActivations.wait

    def counted(self: OffloadedActivations, cell: tuple[int, int]) -> None:
        offload(self, cell)
        shelf = self._shelves[cell]
        sizes.setdefault(cell[0], []).append(shelf.num_bytes)
        note(self)

    def waited(self: OffloadedActivations, cell: tuple[int, int]) -> None:
        note(self)
        wait(self, cell)

    def note(self: OffloadedActivations) -> None:
        here = sum(
            bool(shelf._here()) or shelf._back is not None for shelf in self._shelves.values()
        )
        most[0] = max(most.get(0, 0), here)

    monkeypatch.setattr(OffloadedActivations, "offload", counted)
    monkeypatch.setattr(OffloadedActivations, "wait", waited)

    def rank(communicator: Communicator) -> Mapping[str, Tensor]:
        engine = make_engine(setup, communicator)
        engine.train_step(make_batch(setup.name, seed=0))
        return {}

    run_mesh(setup.mesh, rank)
    assert 0 < most[0] <= ACTIVATION_BUFFERS
    assert len({tuple(sizes[block]) for block in (1, 2, 3)}) == 1  # layers that are alike
    # the account counts the block's input, which stays, as if it were copied, too
    plan, model = make_plan(setup), make_model(setup.name, setup.layers, setup.precision)
    pins: dict[str, int | str] = {"micro_batch_size": plan.batch.micro_batch_size, "pp": 1}
    pins |= {"recompute": "none", "schedule": "1f1b", "loss_chunks": 1, "zero_stage": 3}
    one = Cluster("cpu-local", gpus_per_node=2)
    made = make_instance(
        model, one, global_batch_size=GLOBAL_BATCH, training=plan.training, pin=pins
    )
    costs = made.search.refiner.solve_anyway(made.candidates[0]).stager.costs
    held, given = costs.held_bytes[2], costs.input_bytes[2]
    assert held - given <= sizes[2][0] * (1 + 1e-9) <= held
