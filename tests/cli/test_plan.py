"""``autopar plan``: where models come from, what is printed and written, pins as flags."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from autopar import read_plan
from autopar.ir.plan import to_json
from tests.cli.helpers import BATCH, SEQ, SIZES, assert_refused, run, write_config

TOP_LEVEL = {
    "format",
    "version",
    "model",
    "cluster",
    "mesh",
    "batch",
    "schedule",
    "parameters",
    "segments",
    "certificate",
    "prediction",
}


def test_plan_is_written_and_explained(capfd: pytest.CaptureFixture[str], config, tmp_path):
    path = tmp_path / "plan.json"
    done = run(capfd, "plan", config, *SIZES, "--gpus-per-node", 2, "-o", path)
    assert (done.status, done.err) == (0, "")
    plan = read_plan(path)
    assert done.out == plan.explain() + "\n"
    assert (plan.batch.global_batch_size, plan.model.seq_len) == (BATCH, SEQ)
    assert plan.device_mesh().num_ranks == 2
    assert (plan.cluster.hardware, plan.cluster.gpus_per_node) == ("cpu-local", 2)


def test_json_is_the_written_plan(capfd: pytest.CaptureFixture[str], config, tmp_path):
    path = tmp_path / "plan.json"
    arguments = ("plan", config / "config.json", *SIZES, "--gpus-per-node", 1)
    done = run(capfd, *arguments, "--json", "-o", path)
    document = json.loads(done.out)
    assert document == json.loads(path.read_text())
    assert done.out == to_json(read_plan(path)) + "\n"
    assert set(document) >= TOP_LEVEL
    assert (document["format"], document["version"]) == ("autopar-plan", 1)
    certificate = document["certificate"]
    assert certificate["gap"] == pytest.approx(
        1 - certificate["bound_s"] / certificate["objective_s"]
    )
    for rank in document["prediction"]["ranks"]:
        assert sum(rank["bytes_by_cause"].values()) == rank["peak_bytes"]
    schema = json.loads(run(capfd, "schema").out)
    jsonschema.validate(document, schema)


def test_pins_are_flags(capfd: pytest.CaptureFixture[str], config):
    flags: dict[str, int | str] = {
        "--tp": 1,
        "--pp": 2,
        "--cp": 1,
        "--ep": 1,
        "--dp-replicate": 1,
        "--dp-shard": 2,
        "--micro-batch-size": 2,
        "--zero-stage": 3,
        "--recompute": "full",
        "--schedule": "layered",
        "--virtual-stages": 1,
    }
    pins = [str(part) for flag in flags.items() for part in flag]
    done = run(capfd, "plan", config, *SIZES, "--gpus-per-node", 4, *pins, "--json")
    document = json.loads(done.out)
    assert document["mesh"] == {
        "pp": 2,
        "dp_replicate": 1,
        "dp_shard": 2,
        "cp": 1,
        "ep": 1,
        "tp": 1,
        "axis_order": ["pp", "dp_replicate", "dp_shard", "cp", "ep", "tp"],
    }
    assert document["batch"] == {
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "num_micro_batches": 2,
        "shares": [],
    }
    schedule = document["schedule"]
    assert (schedule["name"], schedule["recompute"], schedule["zero_stage"]) == (
        "layered",
        "full",
        3,
    )
    assert document["pins"]["tp"] == 1
    assert document["pins"]["schedule"] == "layered"


def test_training_flags_are_stored(capfd: pytest.CaptureFixture[str], config):
    done = run(
        capfd,
        *("plan", config, *SIZES, "--gpus-per-node", 1, "--json"),
        *("--precision", "float64", "--optimizer", "sgd", "--learning-rate", "0.5"),
        *("--weight-decay", "0", "--max-grad-norm", "0", "--seed", "7"),
    )
    training = json.loads(done.out)["training"]
    assert training["precision"] == "float64"
    assert (training["optimizer"], training["learning_rate"]) == ("sgd", 0.5)
    assert (training["weight_decay"], training["max_grad_norm"]) == (0, None)
    assert training["seed"] == 7


@pytest.mark.parametrize("hardware", ["a100-80gb", "a100-40gb", "h100-80gb"])
def test_big_hardware_needs_no_gpu_here(capfd: pytest.CaptureFixture[str], config, hardware):
    pins = ("--tp", 2, "--dp-replicate", 4, "--pp", 2, "--micro-batch-size", 1)
    arguments = ("plan", config, "--cluster", hardware, "--nodes", 2, *pins, "--json")
    document: dict[str, Any] = json.loads(run(capfd, *arguments).out)
    cluster = document["cluster"]
    assert (cluster["hardware"], cluster["nodes"], cluster["gpus_per_node"]) == (hardware, 2, 8)
    assert (cluster["device"], cluster["backend"]) == ("cuda", "nccl")
    assert document["training"]["precision"] == "bf16"
    assert document["batch"]["global_batch_size"] == 16  # one sequence for each GPU
    assert document["model"]["seq_len"] == SEQ  # the longest


FUNCTION = """
import torch
from torch import nn
from torch.nn import functional as F

def make(seq_len: int = 8):
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
    tokens = torch.zeros(2, seq_len, dtype=torch.long)
    return model, {"input": tokens, "targets": tokens}, loss

def fixed():
    return make()

def loss(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
"""


def test_functions_are_models(capfd: pytest.CaptureFixture[str], tmp_path, monkeypatch):
    (tmp_path / "user_models.py").write_text(FUNCTION)
    monkeypatch.syspath_prepend(tmp_path)
    cluster = ("--cluster", "cpu-local", "--gpus-per-node", 1)
    lengths = []
    for function, flags in (("make", ("--seq-len", 4)), ("make", ()), ("fixed", ())):
        path = tmp_path / "plan.json"
        done = run(capfd, "plan", f"user_models:{function}", *cluster, *flags, "-o", path)
        assert done.err == ""
        lengths.append(read_plan(path).model.seq_len)
        monkeypatch.setenv("RANK", "0")  # as one launched rank, so that no process is started
        done = run(capfd, "run", path, "--steps", 1)
        monkeypatch.delenv("RANK")
        assert (done.status, done.err) == (0, "")
        assert json.loads(done.out)["step"] == 1
    assert lengths == [4, 8, 8]


def test_another_process_makes_the_same_plan_and_is_silent_in_a_pipe(plan_file: Path, config: Path):
    """Under another hash seed: no order of a set or a dict of addresses gets into a plan."""
    flags = ("--gpus-per-node", "2", "--tp", "2", "--precision", "fp32", "--json")
    command = [sys.executable, "-m", "autopar", "plan", str(config), *SIZES, *flags]
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == ""
    documents = [json.loads(done.stdout), json.loads(plan_file.read_text())]
    for document in documents:
        document["certificate"]["solve_s"] = 0
    assert documents[0] == documents[1]


def test_a_terminal_sees_progress(capfd: pytest.CaptureFixture[str], config, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    done = run(capfd, "plan", config, *SIZES, "--gpus-per-node", 1)
    assert "capturing tiny" in done.err
    assert done.err.endswith("\r\x1b[K")


def test_what_does_not_fit_is_said(capfd: pytest.CaptureFixture[str], tmp_path):
    """Embedding and head of 2^26 parameters each: with gradients and Adam's state 16 bytes each."""
    config = write_config(tmp_path / "wide", vocab_size=2**16, hidden_size=1024)
    done = run(capfd, "plan", config, *SIZES, "--gpus-per-node", 1)
    assert_refused(done, "no plan fits into 2.00 GiB", "fullest rank", "stage 0", "optimizer 1.0")
    assert re.search(r"needs 2\.\d\d GiB, \S+ (GiB|MiB) too much", done.err)
    assert re.search(r"try: 2 nodes \(a step then takes at most \S+ m?s\)\n$", done.err)


def test_a_model_function_is_found_in_the_current_directory(tmp_path):
    (tmp_path / "here.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = torch.nn.Linear(8, 8)\n"
        "    def forward(self, x):\n"
        "        return self.inner(x).square().mean()\n"
        "def make():\n"
        "    return Model(), {'x': torch.zeros(2, 8)}\n"
    )
    script = Path(sys.executable).with_name("autopar")  # unlike -m, it does not look there itself
    options = ["--cluster", "cpu-local", "--gpus-per-node", "1", "--global-batch-size", "2"]
    done = subprocess.run(
        [script, "plan", "here:make", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "here:make" in done.stdout


def test_objectives_and_ranges_are_flags(capfd: pytest.CaptureFixture[str], config):
    flags = ("--tp", 1, "--recompute", "none", "--gpus-per-node", 2, "--json")
    cost = ("--objective", "cost", "--price-per-gpu-hour", 2.5, "--gpus", "1:4")
    found = json.loads(run(capfd, "plan", config, *SIZES, *flags, *cost).out)["objective"]
    assert (found["name"], found["settings"]) == ("cost", {"price_per_gpu_hour": 2.5})
    assert [count["num_gpus"] for count in found["by_count"]] == [1, 2, 4]
    done = run(capfd, "plan", config, *SIZES, *flags, "--gpus", "x")
    assert done.status == 2
    assert_refused(run(capfd, "plan", config, *SIZES, "--objective", "gpus"), "deadline_s")


def test_a_plan_starts_from_an_old_one(
    capfd: pytest.CaptureFixture[str], config, plan_file, tmp_path
):
    flags = ("--gpus-per-node", 2, "--precision", "fp32", "--json")
    limits = ("--warm-start", plan_file, "--time-limit", 0)
    found = json.loads(run(capfd, "plan", config, *SIZES, *flags, *limits).out)
    assert (found["mesh"]["tp"], found["certificate"]["num_solved"]) == (2, 1)
    missing = ("--warm-start", tmp_path / "none.json")
    assert_refused(run(capfd, "plan", config, *SIZES, *flags, *missing), "none.json")


def test_what_changes_would_buy_is_asked_for(capfd: pytest.CaptureFixture[str], config):
    flags = ("--tp", 1, "--recompute", "none", "--gpus-per-node", 2)
    done = run(capfd, "plan", config, *SIZES, *flags, "--what-if")
    assert "what changes would buy" in done.out
    assert "twice the links inside nodes" in done.out
