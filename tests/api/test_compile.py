"""``autopar.compile`` on real ranks, and what it refuses."""

from __future__ import annotations

import dataclasses
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster
from autopar.api import compile_plan
from autopar.ir.errors import ClusterError, InputError, PlanFormatError
from tests.models import tiny_gpt2, tiny_llama, tiny_transformer, token_batch
from tests.runtime.processes import run_processes
from tests.runtime.test_processes import assert_all_succeed

ONE = Cluster("cpu-local", gpus_per_node=1)


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_train_what_one_process_trains(tmp_path: Path):
    """Slow: 6 models are compiled by 4 processes, in one start. See the worker for what they hold
    against one process: two arguments alone, local batches, own module, loss and optimizer, a
    checkpoint under another plan, clusters that do not match.
    """
    ended = run_processes(4, "compiles", str(tmp_path), worker_module="tests.api.worker")
    assert_all_succeed(ended)
    seen = {next(filter(is_json, end.output.splitlines())) for end in ended}
    assert len(seen) == 1, "ranks saw different losses or states"


def is_json(line: str) -> bool:
    return line.startswith("[[")


@pytest.mark.ranks
@pytest.mark.slow
def test_an_error_while_planning_reaches_every_rank_at_once(tmp_path: Path):
    """Slow: starts processes. Ranks may wait for 60 s, and must not."""
    text = (resources.files("autopar.solver.hardware") / "cpu-local.toml").read_text()
    hardware = tmp_path / "tiny.toml"
    hardware.write_text(text.replace("2_147_483_648", "4_096"))
    ended = run_processes(4, "infeasible", str(hardware), worker_module="tests.api.worker")
    for rank, end in enumerate(ended):
        assert end.code == 3, end.output[-3000:]
        assert end.output.startswith("other: the first rank has no plan" if rank else "first: no")
        assert "too much" in end.output
        assert end.after_s < 45


def test_one_process_is_a_world_of_one():
    module, _ = tiny_llama(1)
    with autopar.compile(module, ONE, learning_rate=0.1) as compiled:
        assert compiled.rank == 0
        losses = [compiled.train_step(token_batch(8)).loss for _ in range(2)]
    assert losses[1] < losses[0]


def test_a_model_is_evaluated_without_dropout_and_without_learning():
    module, _ = tiny_gpt2(1, dropout=0.5)
    batch = token_batch(8)
    module.eval()
    with torch.no_grad():
        expected = module(**batch).loss.item()
    with autopar.compile(module, ONE) as compiled:
        found = [compiled.eval_step(batch).loss for _ in range(2)]
        assert compiled.num_steps == 0
        trained = compiled.train_step(batch).loss
        assert compiled.eval_step(batch).loss < expected
    assert found == pytest.approx([expected] * 2, abs=1e-5)
    assert trained != pytest.approx(expected, abs=1e-3)  # half of everything was dropped


def test_weights_that_nothing_initializes_are_an_error():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale).sum()

    batch = {"x": torch.ones(2, 4)}
    with pytest.raises(InputError, match="scale is on the meta device, and nothing says how"):
        autopar.compile(Scaled().to("meta"), ONE, example_batch=batch)


def test_a_module_on_the_meta_device_trains_from_what_its_modules_say():
    module, inputs, loss_fn = tiny_transformer(1)
    batch = {name: tensor.repeat(4, 1) for name, tensor in inputs.items()}
    with autopar.compile(module.to("meta"), ONE, example_batch=inputs, loss_fn=loss_fn) as compiled:
        first = compiled.train_step(batch).loss
    assert 4 < first < 6  # ln 128 is 4.85
    assert all(parameter.is_meta for parameter in module.parameters())


def test_more_ranks_than_run_are_an_error():
    module, _ = tiny_llama(1)
    with pytest.raises(ClusterError, match="4 ranks, but 1 run"):
        autopar.compile(module, Cluster("cpu-local", gpus_per_node=4))
    plan = autopar.plan(module, Cluster("cpu-local", gpus_per_node=4), pin={"tp": 4})
    named = dataclasses.replace(plan, model=dataclasses.replace(plan.model, source="json:loads"))
    with pytest.raises(ClusterError, match="4 ranks, but 1 run"):
        compile_plan(named)


def test_a_plan_of_a_module_in_memory_runs_with_that_module_only():
    module, _ = tiny_llama(1)
    plan = autopar.plan(module, ONE)
    with pytest.raises(InputError, match="given in memory"):
        compile_plan(plan)
    other, _ = tiny_llama(1, intermediate_size=64)
    with pytest.raises(PlanFormatError, match="another model"):
        autopar.compile(other, ONE, plan=plan)
    with autopar.compile(module, ONE, plan=plan) as compiled:
        assert compiled.train_step(token_batch(8)).num_tokens > 0


def test_leaving_with_an_error_ends_the_communication():
    module, _ = tiny_llama(1)
    with (
        pytest.raises(ZeroDivisionError),
        autopar.compile(module, ONE) as compiled,
    ):
        raise ZeroDivisionError
    assert not torch.distributed.is_initialized()
    compiled.close()  # once more is no error


def test_an_optimizer_that_cannot_be_made_ends_the_communication():
    def fail(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        autopar.compile(tiny_llama(1)[0], ONE, optimizer=fail)
    assert not torch.distributed.is_initialized()


def test_a_module_needs_example_inputs_unless_it_is_from_hugging_face():
    with pytest.raises(InputError, match="example inputs are needed"):
        autopar.compile(nn.Linear(2, 2), ONE)
