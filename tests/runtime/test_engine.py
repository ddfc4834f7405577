"""What the engine issues, frees and refuses (ranks are threads)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.errors import InputError, RankFailedError
from autopar.ir.mesh import Mesh
from autopar.runtime.communicator import Communicator
from autopar.runtime.engine import Engine
from autopar.runtime.threads import ThreadCommunicator, ThreadGroup, run_mesh
from tests.runtime.cases import GLOBAL_BATCH, Setup, initial_parameters, make_batch
from tests.runtime.harness import lowered, make_engine, train_on_threads


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("pp", [1, 2])
def test_layered_zero3_gathers_at_most_twice_and_reduces_once(pp: int, recompute: str):
    setup = Setup(
        layers=4,
        mesh=Mesh(pp=pp, dp_shard=2),
        schedule="layered",
        zero_stage=3,
        num_micro_batches=4,
        recompute=recompute,  # type: ignore[arg-type]
    )
    for outcome in train_on_threads(setup, 1):
        assert all(count in (1, 2) for count in outcome.num_gathers.values())
        assert all(count == 1 for count in outcome.num_reductions.values())


def test_1f1b_zero3_gathers_once_or_twice_per_micro_batch():
    setup = Setup(layers=4, mesh=Mesh(pp=2, dp_shard=2), zero_stage=3, num_micro_batches=4)
    for outcome in train_on_threads(setup, 1):
        assert all(4 <= count <= 8 for count in outcome.num_gathers.values())
        assert all(count == 4 for count in outcome.num_reductions.values())


def test_counted_gathers_are_the_collectives_that_are_issued(monkeypatch: pytest.MonkeyPatch):
    issued: list[str] = []
    for name in ("start_all_gather", "start_reduce_scatter"):
        original = getattr(ThreadGroup, name)

        def counted(self: ThreadGroup, *args: Tensor, _name=name, _original=original):
            if self.rank == 0:
                issued.append(_name)
            return _original(self, *args)

        monkeypatch.setattr(ThreadGroup, name, counted)
    setup = Setup(mesh=Mesh(dp_shard=2), schedule="layered", zero_stage=3, num_micro_batches=4)
    outcome = train_on_threads(setup, 1)[0]
    units = len(outcome.num_gathers)
    assert issued.count("start_all_gather") == sum(outcome.num_gathers.values()) == 2 * units - 1
    assert issued.count("start_reduce_scatter") == units


def test_zero3_keeps_no_gathered_parameter_between_steps():
    setup = Setup(mesh=Mesh(dp_shard=2), schedule="layered", zero_stage=3)
    make_engine_once(setup)

    def stored_bytes(communicator: Communicator) -> int:
        engine = make_engine(setup, communicator)
        engine.train_step(make_batch(setup.name, seed=0))
        tensors = (engine.store.tensor(name) for name in engine.store.parameters)
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    assert run_mesh(setup.mesh, stored_bytes) == [0, 0]


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_what_stays_gathered_is_gathered_to_the_same_memory_in_each_step(zero_stage: int):
    setup = Setup(mesh=Mesh(dp_shard=2), schedule="layered", zero_stage=zero_stage)
    make_engine_once(setup)

    def is_moved(communicator: Communicator) -> bool:
        engine = make_engine(setup, communicator)
        places: list[list[int]] = []
        for seed in range(2):
            engine.train_step(make_batch(setup.name, seed=seed))
            tensors = [engine.store.tensor(name) for name in engine.store.parameters]
            places.append([tensor.data_ptr() for tensor in tensors])
        return places[0] != places[1]

    assert run_mesh(setup.mesh, is_moved) == [False, False]


def test_local_batches_are_the_shares_of_data_ranks():
    setup = Setup(mesh=Mesh(dp_shard=2))
    make_engine_once(setup)
    batch = make_batch(setup.name, seed=0)

    def losses(communicator: Communicator) -> tuple[float, float]:
        engine = make_engine(setup, communicator)
        whole = engine.train_step(batch).loss
        engine.load_parameters(initial_parameters(setup.name, setup.layers, setup.precision))
        half = GLOBAL_BATCH // 2
        share = {name: t[communicator.rank * half :][:half] for name, t in batch.items()}
        return whole, engine.train_step(share, local=True).loss

    for whole, local in run_mesh(setup.mesh, losses):
        assert local == whole


def make_engine_once(setup: Setup) -> None:
    """Do what threads must not do at the same time."""
    lowered(setup)
    initial_parameters(setup.name, setup.layers, setup.precision)


def alone(setup: Setup, **options: object) -> Engine:
    program, model, plan = lowered(setup)
    engine = run_mesh(Mesh(), lambda c: Engine(program, model, plan, c, **options))[0]  # type: ignore[arg-type]
    engine.load_parameters(initial_parameters(setup.name, setup.layers, setup.precision))
    return engine


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {"input_ids": b["input_ids"]}, "labels is missing"),
        (lambda b: {k: v[:3] for k, v in b.items()}, "3 sequences"),
        (lambda b: {k: v[:, :5] for k, v in b.items()}, "shape"),
        (lambda b: {**b, "labels": b["labels"][0, 0]}, "with 2 dims"),
        (lambda b: {**b, "labels": b["labels"].float()}, "labels is torch.float32"),
        (lambda b: {**b, "labels": b["labels"].tolist()}, "labels is a list"),
        (lambda b: list(b.values()), "the batch is a list"),
        (lambda b: {**b, "labels": torch.full_like(b["labels"], -100)}, "no valid token"),
    ],
)
def test_batches_that_do_not_fit_are_refused(change, message: str):
    engine = alone(Setup())
    with pytest.raises(InputError, match=message):
        engine.train_step(change(make_batch("llama", seed=0)))


def test_integers_of_any_width_are_taken():
    engine, other = alone(Setup()), alone(Setup())
    batch = make_batch("llama", seed=0)
    narrow = {name: tensor.int() for name, tensor in batch.items()}
    assert engine.train_step(narrow).loss == other.train_step(batch).loss


def test_what_the_model_does_not_read_may_be_anything():
    engine, other = alone(Setup()), alone(Setup())
    batch = make_batch("llama", seed=0)
    more: dict[str, Any] = {**batch, "names": ["a", "b"], "index": torch.arange(3)}
    assert engine.train_step(more).loss == other.train_step(batch).loss


def test_parameters_must_be_loaded_whole():
    program, model, plan = lowered(Setup())
    engine = run_mesh(Mesh(), lambda c: Engine(program, model, plan, c))[0]
    with pytest.raises(InputError, match="no parameters were loaded"):
        engine.train_step(make_batch("llama", seed=0))
    with pytest.raises(InputError, match="is missing"):
        engine.load_parameters({})
    wrong = {n: p[:1] for n, p in initial_parameters("llama", 2, "fp32").items()}
    with pytest.raises(InputError, match="shape"):
        engine.load_parameters(wrong)


def test_users_can_make_the_optimizer():
    made: list[int] = []

    def factory(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(len(parameters))
        return torch.optim.RMSprop(parameters, lr=1e-3)

    engine = alone(Setup(), optimizer=factory)
    first = engine.train_step(make_batch("llama", seed=0)).loss
    assert engine.train_step(make_batch("llama", seed=0)).loss < first
    assert made == [len(initial_parameters("llama", 2, "fp32"))]


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_optimizers_that_need_whole_parameters_are_refused(kind: type[torch.optim.Optimizer]):
    with pytest.raises(InputError, match=f"{kind.__name__} works on whole parameters"):
        alone(Setup(), optimizer=kind)


def test_a_gradient_that_is_no_number_spoils_the_step_as_it_does_in_torch():
    engine = alone(Setup(max_grad_norm=1.0))
    broken = engine.full_parameters()
    broken["model.norm.weight"][0] = torch.nan
    engine.load_parameters(broken)
    result = engine.train_step(make_batch("llama", seed=0))
    assert result.grad_norm != result.grad_norm
    assert all(tensor.isnan().all() for tensor in engine.full_parameters().values())


def test_gradient_clipping_limits_the_update():
    engine = alone(Setup(max_grad_norm=1e-3))
    before = engine.full_parameters()
    result = engine.train_step(make_batch("llama", seed=0))
    assert result.grad_norm > 1e-3
    updates = [after - before[name] for name, after in engine.full_parameters().items()]
    norm = torch.stack([update.norm() for update in updates]).norm()
    rate = 0.1
    torch.testing.assert_close(norm, torch.tensor(rate * 1e-3), rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(mesh=Mesh(pp=2)),
        Setup(mesh=Mesh(tp=2)),
        Setup(mesh=Mesh(pp=2, dp_shard=2)),
        Setup(mesh=Mesh(pp=2), offload_optimizer=True, offloaded_blocks=(0, 1, 2)),
    ],
    ids=str,
)
def test_an_exception_on_one_rank_ends_all_ranks(setup: Setup):
    mesh = setup.mesh
    make_engine_once(setup)
    errors: dict[int, Exception] = {}

    def run(communicator: ThreadCommunicator) -> None:
        engine = make_engine(setup, communicator)
        is_broken = communicator.rank == mesh.num_ranks - 1
        try:
            with BrokenMatmul() if is_broken else nullcontext():
                engine.train_step(make_batch(setup.name, seed=0))
        except RankFailedError as error:
            errors[communicator.rank] = error

    run_mesh(mesh, run)
    assert sorted(errors) == list(range(mesh.num_ranks))
    last = mesh.num_ranks - 1
    for error in errors.values():
        assert f"rank {last}, stage {mesh.pp - 1}, action F" in str(error)
        assert "broken on purpose" in str(error)
        assert "linear" in str(error)
        assert "modeling_llama.py" in str(error)


def test_a_rank_lets_go_of_its_step_when_another_one_fails(monkeypatch: pytest.MonkeyPatch):
    engine = alone(Setup(offloaded_blocks=(1, 2)))
    executor = engine._trainer

    def failure() -> str | None:
        return "rank 7 is gone" if len(executor._state.tapes) == 3 else None

    monkeypatch.setattr(engine.communicator, "failure", failure)
    with pytest.raises(RankFailedError, match="rank 7 is gone"):
        engine.train_step(make_batch("llama", seed=0))
    assert not executor._state.tapes
    assert not executor._offloaded._shelves


class BrokenMatmul(TorchDispatchMode):
    """Makes every matrix product of this thread raise."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            raise ValueError("broken on purpose")
        return func(*args, **(kwargs or {}))


def test_state_dict_has_parameters_optimizer_state_and_step():
    setup = Setup(name="gpt2", mesh=Mesh(pp=2, dp_shard=2), zero_stage=3, optimizer="adamw")
    make_engine_once(setup)

    def run(communicator: Communicator) -> Mapping[str, Tensor]:
        engine = make_engine(setup, communicator)
        engine.train_step(make_batch(setup.name, seed=0))
        return engine.state_dict()

    for state in run_mesh(setup.mesh, run):
        assert state["num_steps"] == 1
        for name, parameter in initial_parameters("gpt2", 2, "fp32").items():
            assert state[f"parameters/{name}"].shape == parameter.shape
            assert state[f"optimizer/exp_avg/{name}"].shape == parameter.shape
            assert state[f"optimizer/step/{name}"] == 1
