"""The eval graph runs on the training parameters, under the placements of the training plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture, run_reference
from autopar.ir.errors import InputError
from autopar.ir.graph import ModelGraph
from autopar.ir.mesh import Mesh
from autopar.ir.precision import DTYPES
from autopar.ir.schedule import ActionKind
from autopar.ir.schedules import forward_only
from autopar.passes import lower_evaluation, lower_plan
from autopar.runtime.communicator import Communicator
from autopar.runtime.engine import Engine
from autopar.runtime.results import EvalResult
from autopar.runtime.threads import run_mesh
from tests.models import tiny_gpt2
from tests.runtime.cases import (
    Setup,
    initial_parameters,
    make_batch,
    make_model,
    make_module,
    make_plan,
)
from tests.runtime.laid_out import laid_out

SETUPS = [
    Setup(),
    Setup(mesh=Mesh(pp=2, tp=2), sequence=True),
    Setup(mesh=Mesh(pp=2, dp_shard=2), zero_stage=3, schedule="layered", recompute="full"),
    Setup(layers=4, mesh=Mesh(pp=2, dp_shard=2), zero_stage=3, schedule="layered", modular=True),
    Setup(mesh=Mesh(dp_replicate=2, tp=2)),
    Setup(mesh=Mesh(dp_shard=2), zero_stage=1, offload_optimizer=True, offloaded_blocks=(0, 1)),
]


def eval_graph(setup: Setup) -> ModelGraph:
    module = make_module("dropout", setup.layers, setup.precision)
    batch = make_batch("dropout", seed=0, size=2)
    return capture(module, batch, compute_dtype=DTYPES[setup.precision], training=False)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_eval_steps_between_train_steps_see_the_parameters_without_dropout(setup: Setup) -> None:
    model = make_model("dropout", setup.layers, "fp32")
    setup = replace(setup, name="dropout")
    plan = make_plan(setup)
    program = lower_plan(model, plan)
    evaluation = lower_evaluation(model, plan, eval_graph(setup))
    weights = initial_parameters("dropout", setup.layers, "fp32")
    batches = [make_batch("dropout", seed=seed) for seed in range(3)]

    def run(communicator: Communicator) -> tuple[list[float], list[EvalResult], list[Tensors]]:
        engine = Engine(program, model, plan, communicator)
        engine.load_parameters(weights)
        engine.set_evaluation(*evaluation)
        losses, results, parameters = [], [], []
        for batch in batches:
            results.append(engine.eval_step(batch))
            parameters.append(engine.full_parameters())
            losses.append(engine.train_step(batch).loss)
        assert engine.num_steps == len(batches)
        return losses, results, parameters

    def train(communicator: Communicator) -> list[float]:
        engine = Engine(program, model, plan, communicator)
        engine.load_parameters(weights)
        return [engine.train_step(batch).loss for batch in batches]

    undisturbed = run_mesh(setup.mesh, train)
    module, _ = tiny_gpt2(setup.layers)
    module.eval()
    for rank, (losses, results, parameters) in enumerate(run_mesh(setup.mesh, run)):
        assert losses == undisturbed[rank]
        for batch, result, current in zip(batches, results, parameters, strict=True):
            module.load_state_dict(current, strict=False)
            with torch.no_grad():
                expected = module(**batch).loss.item()
            assert result.loss == pytest.approx(expected, abs=1e-5)
            # transformers shift labels: the first of each sequence is nobody's target
            assert result.num_tokens == int((batch["labels"][:, 1:] != -100).sum())


Tensors = dict[str, Tensor]


class Switching(nn.Module):
    """Behaves otherwise in training: noise that is drawn, a branch, and another op altogether."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        if self.training:
            h = h * torch.bernoulli(torch.full_like(h, 0.5)) * 2
            h = torch.relu(h)
        else:
            h = torch.relu(h) + 0 * torch.sigmoid(h).cumsum(-1)
        return (self.second(h) - y).square().mean()


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(dp_shard=2)], ids=["tp", "dp"])
def test_ops_that_training_does_not_have_are_typed_too(mesh: Mesh) -> None:
    torch.manual_seed(0)
    module = Switching()
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    case = laid_out(module, batch, Setup(mesh=mesh), micro_batch_size=4 // mesh.dp)
    graph = capture(module, batch, training=False)
    program = lower_plan(case.model, case.plan)
    evaluation = lower_evaluation(case.model, case.plan, graph)

    def run(communicator: Communicator) -> float:
        engine = Engine(program, case.model, case.plan, communicator)
        engine.load_parameters(case.weights)
        engine.set_evaluation(*evaluation)
        return engine.eval_step(batch).loss

    expected, _ = run_reference(graph, case.weights, batch)
    for loss in run_mesh(mesh, run):
        assert loss == pytest.approx(expected.item(), abs=1e-6)


def test_nothing_is_evaluated_before_it_is_known_with_what() -> None:
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    case = laid_out(Switching(), batch, Setup(), micro_batch_size=4)
    (engine,) = case.engines()
    with pytest.raises(InputError, match="nothing to evaluate with"):
        engine.eval_step(batch)


@pytest.mark.parametrize("stages", [(0, 0, 1), (0, 1, 0, 1)], ids=str)
def test_forward_only_schedules_run_every_forward_once(stages: tuple[int, ...]) -> None:
    schedule = forward_only(stages, 3, zero_stage=3)
    actions = [action for actions in schedule.actions for action in actions]
    forwards = [(a.segment, a.micro_batch) for a in actions if a.kind is ActionKind.FORWARD]
    assert sorted(forwards) == [(segment, m) for segment in range(len(stages)) for m in range(3)]
    others = (ActionKind.BACKWARD, ActionKind.REDUCE_GRADIENTS, ActionKind.SEND_GRADIENTS)
    assert not any(action.kind in others for action in actions)
