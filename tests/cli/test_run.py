"""``autopar run``: ranks that it starts itself train what one process trains, and fail as one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from autopar import read_plan
from autopar.api import plan_source
from autopar.cli.run import step_line
from autopar.runtime import StepResult
from tests.cli.helpers import BATCH, SEQ, VOCAB, assert_refused, run

STEPS = 3
NUM_SEQUENCES = 20
"""No multiple of the batch: the file is read round and round."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "tokens.npy"
    generator = np.random.default_rng(0)
    np.save(path, generator.integers(VOCAB, size=NUM_SEQUENCES * SEQ + 5, dtype=np.int32))
    return path


def one_process(plan_file: Path, tokens: Path) -> list[tuple[float, float]]:
    """Losses and gradient norms of the plain model under plain PyTorch, on the same file."""
    training = read_plan(plan_file).training
    model = plan_source(read_plan(plan_file)).build(device="cpu", seed=training.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=training.learning_rate,
        betas=training.betas,
        eps=training.eps,
        weight_decay=training.weight_decay,
    )
    sequences = torch.from_numpy(np.load(tokens).astype(np.int64))[: NUM_SEQUENCES * SEQ]
    sequences = sequences.view(NUM_SEQUENCES, SEQ)
    found = []
    for step in range(STEPS):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % NUM_SEQUENCES
        loss = model(input_ids=sequences[rows], labels=sequences[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """``autopar run`` in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    return subprocess.run(
        [sys.executable, "-m", "autopar", "run", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_train_from_a_file_and_go_on_from_a_checkpoint(
    plan_file: Path, tokens: Path, tmp_path: Path
):
    """Slow: starts 2 processes twice. What is trained in two runs equals one process's steps."""
    saved = tmp_path / "saved"
    lines: list[dict[str, float]] = []
    for flags in (("--steps", 2, "--save", saved), ("--steps", 1, "--load", saved)):
        done = command(plan_file, "--data", tokens, *flags)
        assert (done.returncode, done.stderr) == (0, "")
        lines += [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    found = [(line["loss"], line["grad_norm"]) for line in lines]
    for (loss, norm), (expected_loss, expected_norm) in zip(
        found, one_process(plan_file, tokens), strict=True
    ):
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    for line in lines:
        assert line["seconds"] > 0
        num_tokens = line["tokens_per_s"] * line["seconds"]
        assert num_tokens == pytest.approx(BATCH * (SEQ - 1), rel=1e-2)  # the last has no next


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_that_fail_give_one_message(plan_file: Path, tmp_path: Path):
    """Slow: starts 2 processes, each of which finds that the model is another one."""
    document = json.loads(plan_file.read_text())
    document["model"]["fingerprint"] = "0" * 64
    path = tmp_path / "other.json"
    path.write_text(json.dumps(document))
    done = command(path)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"autopar: error: the plan is for another model.*(\n  .*)+\n", done.stderr)


def test_a_plan_for_one_rank_gets_its_losses_from_synthetic_data(
    capfd: pytest.CaptureFixture[str], config: Path, tmp_path: Path, monkeypatch
):
    path = tmp_path / "plan.json"
    monkeypatch.setenv("RANK", "0")  # as one launched rank, so that no process is started
    arguments = ("--cluster", "cpu-local", "--gpus-per-node", 1, "--seed", 3)
    assert run(capfd, "plan", config, *arguments, "-o", path).status == 0
    twice = [run(capfd, "run", path, "--steps", 2) for _ in range(2)]
    losses = [[json.loads(line)["loss"] for line in done.out.splitlines()] for done in twice]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


def test_a_checkpoint_of_a_run_goes_on_where_its_data_ended(
    capfd: pytest.CaptureFixture[str], config: Path, tmp_path: Path, monkeypatch
):
    path, saved = tmp_path / "plan.json", tmp_path / "saved"
    monkeypatch.setenv("RANK", "0")
    arguments = ("--cluster", "cpu-local", "--gpus-per-node", 1, "--precision", "float64")
    assert run(capfd, "plan", config, *arguments, "-o", path).status == 0
    whole = run(capfd, "run", path, "--steps", 3).out.splitlines()
    first = run(capfd, "run", path, "--steps", 2, "--save", saved).out.splitlines()
    rest = run(capfd, "run", path, "--steps", 1, "--load", saved, "--save", saved)
    assert rest.err == ""
    losses = [json.loads(line)["loss"] for line in whole]
    assert [json.loads(line)["loss"] for line in (*first, *rest.out.splitlines())] == losses
    assert_refused(run(capfd, "run", path, "--load", tmp_path), "checkpoint")


def test_a_line_of_a_skipped_step_is_json(plan_file: Path) -> None:
    """An overflow has no norm; the scale of the loss is told under fp16."""
    plan = read_plan(plan_file)
    fp16 = replace(plan, training=replace(plan.training, precision="fp16"))
    result = StepResult(
        loss=2.0, grad_norm=float("inf"), num_tokens=8, seconds=0.5, skipped=True, loss_scale=4.0
    )
    line = step_line(3, result, fp16)
    assert json.loads(json.dumps(line, allow_nan=False)) == {
        "step": 3,
        "loss": 2.0,
        "grad_norm": None,
        "seconds": 0.5,
        "tokens_per_s": 16.0,
        "loss_scale": 4.0,
        "skipped": True,
    }
    assert "loss_scale" not in step_line(3, result, plan)
