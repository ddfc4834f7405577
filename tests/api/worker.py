"""What the ranks of the API's process tests do; ``run_processes`` starts it.

``python -m tests.api.worker FOLDER NUM_RANKS NAME ARGUMENTS``, as ``tests.runtime.worker``. A rank
that ends well has seen what it asserts.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Cluster
from autopar.ir.errors import AutoparError, ClusterError, InfeasibleError, PlanFormatError
from tests.models import next_token_loss, tiny_gpt2, tiny_llama, tiny_transformer, token_batch
from tests.runtime.worker import fork_ranks

NUM_RANKS = 4
BATCH = 8
CLUSTER = Cluster("cpu-local", gpus_per_node=NUM_RANKS)


def adamw_losses(module: nn.Module, batches: list[dict[str, Tensor]]) -> list[float]:
    """What one process computes with the defaults of ``autopar.compile``."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8
    )
    losses = []
    for batch in batches:
        loss = module(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


class Records(logging.Handler):
    """Texts of what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def two_arguments() -> None:
    """A Hugging Face model and a cluster are enough."""
    logger, records = logging.getLogger("autopar"), Records()
    logger.addHandler(records)
    logger.setLevel(logging.INFO)
    module, _ = tiny_llama()
    batches = [token_batch(BATCH, seed=seed) for seed in range(3)]
    expected = adamw_losses(module, batches)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with autopar.compile(module, CLUSTER) as compiled:
        plan = compiled.plan
        assert (plan.batch.global_batch_size, plan.model.seq_len) == (BATCH, 16)
        assert (plan.training.optimizer, plan.training.precision) == ("adamw", "fp32")
        told = [text for text in records.texts if "not given" in text]
        assert len(told) == (1 if compiled.rank == 0 else 0), told
        losses = [compiled.train_step(batch).loss for batch in batches]
        assert losses == pytest.approx(expected, abs=1e-5)
        state = compiled.state_dict()
        assert compiled.num_steps == 3
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), "the user's module was changed"
    norms = {name: value.double().norm().item() for name, value in state.items()}
    sys.stdout.write(json.dumps([losses, norms, dataclasses.asdict(plan.mesh)]) + "\n")


def local_batches() -> None:
    """A rank's share gives what the global batch gives."""
    module, _ = tiny_gpt2()
    pin: dict[str, int | str] = {"dp_shard": 2, "tp": 2, "zero_stage": 3}
    batch = token_batch(BATCH)
    losses = []
    for is_local in (False, True):
        # compiled twice in a process: plans must not be mixed up
        with autopar.compile(module, CLUSTER, pin=pin) as compiled:
            assert compiled.plan.schedule.zero_stage == 3
            data_rank = compiled.rank // 2
            share = {name: t[data_rank * 4 :][:4] for name, t in batch.items()}
            result = compiled.train_step(share if is_local else batch, local=is_local)
            losses.append((result.loss, result.grad_norm, result.num_tokens))
        pin["recompute"] = "full"
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def own_module(folder: str) -> None:
    """A module with a loss function and an own optimizer; a checkpoint that another plan loads."""
    module, inputs, loss_fn = tiny_transformer()
    made: list[int] = []

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(len(parameters))
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def batch_of(seed: int) -> dict[str, Tensor]:
        batch = token_batch(BATCH, seed=seed)
        return {"tokens": batch["input_ids"], "targets": batch["labels"]}

    expected_losses, expected = momentum_run(module, [batch_of(seed) for seed in range(4)])
    path, losses = Path(folder) / "saved", []
    for steps, pin in (((0, 1), {"pp": 2, "tp": 2}), ((2, 3), {"dp_shard": 4})):
        compiled = autopar.compile(
            module,
            CLUSTER,
            example_batch=inputs,
            loss_fn=loss_fn,
            global_batch_size=BATCH,
            max_grad_norm=None,
            optimizer=optimizer,
            pin=pin,
        )
        with compiled:
            if steps[0]:
                compiled.load(path)
                assert compiled.num_steps == steps[0]
            losses += [compiled.train_step(batch_of(seed)).loss for seed in steps]
            if not steps[0]:
                compiled.save(path)
            state = compiled.state_dict()
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert len(made) == 2
    assert all(made)
    for name, value in expected.items():
        torch.testing.assert_close(state[f"parameters/{name}"], value, rtol=1e-4, atol=1e-5)


def momentum_run(
    module: nn.Module, batches: list[dict[str, Tensor]]
) -> tuple[list[float], Mapping[str, Tensor]]:
    """Losses and parameters of SGD with momentum in one process."""
    module = copy.deepcopy(module)
    stepper = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches:
        loss = next_token_loss(module(batch["tokens"]), batch)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in module.named_parameters()}


def wrong_clusters() -> None:
    """Refused on every rank, before anything is captured."""
    module, _ = tiny_llama()
    for gpus in (1, 2, 8):
        with pytest.raises(ClusterError, match=f"the cluster has {gpus} ranks, but 4 run"):
            autopar.compile(module, Cluster("cpu-local", gpus_per_node=gpus))
    given = autopar.plan(module, CLUSTER, pin={"tp": 4})
    with pytest.raises(ClusterError, match="the plan is for"):
        autopar.compile(module, Cluster("a100-80gb", gpus_per_node=4), plan=given)
    with pytest.raises(PlanFormatError, match="for another model"):
        autopar.compile(tiny_gpt2()[0], CLUSTER, plan=given)
    with autopar.compile(module, CLUSTER, plan=given) as compiled:
        assert compiled.plan is given


def compiles(folder: str) -> None:
    """Everything that needs ranks which work, in one start."""
    two_arguments()
    local_batches()
    own_module(folder)
    wrong_clusters()


def infeasible(hardware: str) -> None:
    """The first rank finds that nothing fits; the others are told."""
    module, _ = tiny_llama()
    try:
        autopar.compile(module, Cluster(hardware, gpus_per_node=NUM_RANKS))
    except AutoparError as error:
        is_first = isinstance(error, InfeasibleError)
        sys.stdout.write(f"{'first' if is_first else 'other'}: {error}\n")
        sys.stdout.flush()
        os._exit(3)


def main(folder: Path, num_ranks: int, name: str, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    fork_ranks(folder, num_ranks, {"compiles": compiles, "infeasible": infeasible}[name], arguments)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
