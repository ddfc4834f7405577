"""Wrong input of every kind: a status that is not zero, one message on stderr, no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.helpers import BATCH, SEQ, VOCAB, assert_refused, run, write_config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type": "detr"}', "no model of model_type 'detr'"),
        ('{"model_type": "resnet"}', "no image_size"),
        ('{"model_type": "no-such"}', "model_type is 'no-such'"),
        ('{"hidden_size": 8}', "model_type is None"),
        ("[1, 2]", "no transformer config"),
        ("{broken", "is no JSON"),
        ("", "is no JSON"),
        ('{"model_type": "llama", "num_hidden_layers": "many"}', "refuses the config"),
        ('{"model_type": "llama", "hidden_size": 0}', "cannot build"),
    ],
)
def test_a_config_that_is_no_transformer_is_refused(capfd, tmp_path: Path, text: str, said: str):
    (tmp_path / "config.json").write_text(text)
    done = run(capfd, "plan", tmp_path, "--cluster", "cpu-local")
    assert_refused(done, said, str(tmp_path))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("no/such/model", "there is no model at no/such/model"),
        (".", "there is no model at ."),
        ("no_such_module:make", "cannot be imported"),
        ("json:no_such_function", "has no function"),
        ("json:loads", "json:loads failed: TypeError"),
        ("tests.cli.helpers:VOCAB", "has no function"),
        ("time:time", "returned a float"),
    ],
)
def test_a_model_that_is_not_there_is_refused(capfd, tmp_path, monkeypatch, model, said):
    monkeypatch.chdir(tmp_path)
    assert_refused(run(capfd, "plan", model, "--cluster", "cpu-local"), said)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--nodes 0", "nodes is 0"),
        ("--nodes -2", "nodes is -2"),
        ("--gpus-per-node 0", "gpus_per_node is 0"),
        ("--global-batch-size 0", "global_batch_size is 0"),
        ("--seq-len 0", "seq_len is 0"),
        ("--seq-len 1000", "longer than the model's 16 positions"),
        ("--learning-rate 0", "learning_rate is 0"),
        ("--learning-rate nan", "learning_rate is nan"),
        ("--max-grad-norm -1", "max_grad_norm is -1"),
        ("--weight-decay -1", "weight_decay is -1"),
        ("--seed -1", "seed is -1"),
        ("--dp-shard 4 --global-batch-size 2", "4 does not divide the global batch of 2"),
        ("--dp-replicate 4 --global-batch-size 6", "4 does not divide the global batch of 6"),
        ("--micro-batch-size 99", "micro_batch_size=99"),
        ("--tp 3", "tp=3"),
        ("--tp 8", "tp=8"),
        ("--tp 0", "tp=0"),
        ("--pp 4 --tp 4", "pp=4 × tp=4 needs 16 GPUs"),
        ("--cp 3", "cp=3"),
        ("--ep 3", "ep=3"),
        ("--virtual-stages 2 --pp 1", "virtual_stages=2 and pp=1"),
        ("--virtual-stages 0", "virtual_stages=0"),
        ("--schedule interleaved --virtual-stages 1", "needs several virtual stages"),
        ("--zero-stage 5", "zero_stage=5"),
        ("--zero-stage 0 --dp-shard 2", "zero_stage=0 and dp_shard=2"),
    ],
)
def test_a_number_that_cannot_be_is_named_before_the_work(
    capfd, config: Path, monkeypatch, flags: str, said: str
):
    monkeypatch.setattr("autopar.api.planning.capture", refuse_work)
    arguments = ("--cluster", "cpu-local", "--gpus-per-node", 4, "--global-batch-size", BATCH)
    assert_refused(run(capfd, "plan", config, *arguments, *flags.split()), said)


def refuse_work(*args: object, **kwargs: object) -> None:
    raise AssertionError("the mistake was seen only after the capture had begun")


def test_more_stages_than_blocks_are_refused(capfd, config: Path):
    arguments = ("--cluster", "cpu-local", "--gpus-per-node", 16, "--pp", 16)
    assert_refused(run(capfd, "plan", config, *arguments), "pp=16", "blocks")


def test_a_batch_that_no_mesh_divides_is_refused(capfd, config: Path):
    arguments = ("--cluster", "cpu-local", "--gpus-per-node", 7, "--tp", 1, "--pp", 1)
    assert_refused(run(capfd, "plan", config, *arguments, "--global-batch-size", 8), "7 GPUs")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("device = [", "not a TOML file"),
        ('device = "cpu"', "missing field"),
        ("surprise = 1", "unknown field surprise"),
        (None, "No such file"),
    ],
)
def test_a_malformed_hardware_file_is_refused(capfd, config, tmp_path, text, said):
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    assert_refused(run(capfd, "plan", config, "--cluster", path), said, "mine.toml")


def test_unknown_hardware_is_refused_with_what_is_known(capfd, config: Path):
    done = run(capfd, "plan", config, "--cluster", "abacus")
    assert_refused(done, "'abacus'", "a100-80gb", "cpu-local")


@pytest.mark.parametrize("output", ["no/such/folder/plan.json", ".", "/proc/plan.json"])
def test_a_plan_that_cannot_be_written_is_refused_before_the_work(
    capfd, config: Path, tmp_path: Path, monkeypatch, output: str
):
    monkeypatch.setattr("autopar.api.planning.capture", refuse_work)
    monkeypatch.chdir(tmp_path)
    done = run(capfd, "plan", config, "--cluster", "cpu-local", "-o", output)
    assert_refused(done, "cannot write the plan", output)


def test_a_refused_plan_leaves_no_file_and_keeps_the_old_one(capfd, config: Path, tmp_path: Path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("kept")
    for output in (old, new):
        arguments = ("--cluster", "cpu-local", "--tp", 3, "-o", output)
        assert_refused(run(capfd, "plan", config, *arguments), "tp=3")
    assert old.read_text() == "kept"
    assert not new.exists()


def changed(plan_file: Path, folder: Path, **changes: object) -> Path:
    """The plan with other top-level fields."""
    path = folder / "changed.json"
    path.write_text(json.dumps(json.loads(plan_file.read_text()) | changes))
    return path


@pytest.mark.parametrize("command", ["explain", "run"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "plan version 2"),
        ({"version": "1"}, "plan version '1'"),
        ({"format": "other"}, "not an autopar plan"),
        ({"surprise": 1}, "field surprise"),
        ({"mesh": {"pp": 1, "tp": 2}}, "field mesh.dp_replicate"),
        ({"segments": []}, "segments"),
    ],
)
def test_a_file_that_is_no_plan_of_this_version_is_refused(
    capfd, plan_file: Path, tmp_path: Path, command: str, changes: dict[str, object], said: str
):
    path = changed(plan_file, tmp_path, **changes)
    assert_refused(run(capfd, command, path), said, str(path))


@pytest.mark.parametrize("command", ["explain", "run"])
def test_a_file_that_cannot_be_read_is_refused(capfd, plan_file, tmp_path, command):
    truncated = tmp_path / "truncated.json"
    truncated.write_text(plan_file.read_text()[:1000])
    assert_refused(run(capfd, command, truncated), "not a JSON document", "truncated.json")
    assert_refused(run(capfd, command, tmp_path / "absent.json"), "No such file", "absent.json")
    assert_refused(run(capfd, command, tmp_path), "directory")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    assert_refused(run(capfd, command, binary), "not a JSON document")


def test_a_plan_whose_model_is_gone_is_refused(capfd, plan_file: Path, tmp_path: Path):
    model = json.loads(plan_file.read_text())["model"]
    gone = changed(plan_file, tmp_path, model=model | {"source": "no/such/model"})
    assert_refused(run(capfd, "run", gone), "there is no model at no/such/model")
    memory = changed(plan_file, tmp_path, model=model | {"source": None})
    assert_refused(run(capfd, "run", memory), "given in memory")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (np.zeros((4, SEQ)), "float64"),
        (np.zeros((4, SEQ), dtype=bool), "bool"),
        (np.zeros((4, SEQ, 1), dtype=np.int64), "3-d"),
        (np.zeros((4, SEQ + 1), dtype=np.int64), f"have {SEQ + 1} tokens"),
        (np.zeros(SEQ - 1, dtype=np.int64), "fewer tokens"),
        (np.full(SEQ, VOCAB), f"outside the vocabulary of {VOCAB}"),
        (np.full((1, SEQ), -1), f"outside the vocabulary of {VOCAB}"),
    ],
)
def test_tokens_that_the_model_cannot_read_are_refused(capfd, plan_file, tmp_path, tokens, said):
    path = tmp_path / "tokens.npy"
    np.save(path, tokens)
    assert_refused(run(capfd, "run", plan_file, "--data", path), said, str(path))


def test_files_that_hold_no_tokens_are_refused(capfd, plan_file: Path, tmp_path: Path):
    absent = tmp_path / "absent.npy"
    assert_refused(run(capfd, "run", plan_file, "--data", absent), "No such file", str(absent))
    for name, content in (
        ("empty.npy", b""),
        ("text.npy", b"1 2 3"),
        ("pickle.npy", b"\x80\x04N."),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        assert_refused(run(capfd, "run", plan_file, "--data", path), "cannot read tokens", name)
    many = tmp_path / "many.npz"
    np.savez(many, a=np.zeros(2))
    assert_refused(run(capfd, "run", plan_file, "--data", many), "several arrays")


def test_runs_that_cannot_be_are_refused_before_ranks_start(capfd, plan_file, tmp_path):
    assert_refused(run(capfd, "run", plan_file, "--steps", 0), "--steps is 0")
    nothing = tmp_path / "nothing"
    assert_refused(run(capfd, "run", plan_file, "--load", nothing), "no checkpoint", str(nothing))
    file = tmp_path / "file"
    file.touch()
    assert_refused(run(capfd, "run", plan_file, "--save", file), "cannot save there", str(file))
    cluster = json.loads(plan_file.read_text())["cluster"]
    nodes = changed(plan_file, tmp_path, cluster=cluster | {"nodes": 2})
    assert_refused(run(capfd, "run", nodes), "2 nodes", "torchrun --nnodes 2")


def test_a_plan_for_more_ranks_than_torchrun_started_is_refused(capfd, plan_file, monkeypatch):
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("autopar.api.planning.capture", refuse_work)
    done = run(capfd, "run", plan_file)
    assert_refused(done, "the plan has 2 ranks, but 1 run", "torchrun")


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan",),
        ("explain",),
        ("run",),
        ("no-such-command",),
        ("plan", "model", "--nodes", "many"),
        ("plan", "model", "--precision", "fp8"),
        ("plan", "model", "--schedule", "gpipe"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(capfd, arguments):
    done = run(capfd, *arguments)
    assert (done.status, done.out) == (2, "")
    assert "usage: autopar" in done.err


def test_a_checkpoint_of_another_model_is_refused(capfd, tmp_path, monkeypatch):
    """One rank in this process: what the ranks say is what their starter prints."""
    monkeypatch.setenv("RANK", "0")
    plans = []
    for name, width in (("one", 32), ("other", 64)):
        config = write_config(tmp_path / name, hidden_size=width)
        plans.append(tmp_path / f"{name}.json")
        arguments = ("--cluster", "cpu-local", "--gpus-per-node", 1, "-o", plans[-1])
        assert run(capfd, "plan", config, *arguments).status == 0
    saved = tmp_path / "saved"
    assert run(capfd, "run", plans[0], "--steps", 1, "--save", saved).status == 0
    assert_refused(run(capfd, "run", plans[1], "--steps", 1, "--load", saved), "shape")
    assert_refused(run(capfd, "run", plans[0], "--load", tmp_path / "one"), "checkpoint")
