"""The command in this process, and a config so small that a plan of it takes little."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from autopar import cli

CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
BATCH, SEQ, VOCAB = 8, 16, 64
SIZES = ("--cluster", "cpu-local", "--global-batch-size", str(BATCH), "--seq-len", str(SEQ))


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a command ended."""

    status: int
    out: str
    err: str


def write_config(folder: Path, **changes: object) -> Path:
    """A model's directory."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> Done:
    """``autopar ARGUMENTS`` in this process; argparse's exits count as statuses."""
    capfd.readouterr()
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:  # of argparse
        status = int(str(stop.code))
    out, err = capfd.readouterr()
    return Done(status=status, out=out, err=err)


def assert_refused(done: Done, *said: str) -> None:
    """One clear message that says ``said``, on stderr alone; no traceback."""
    assert done.status == 1
    assert done.out == ""
    assert done.err.count("autopar: error: ") == 1
    assert done.err.startswith("autopar: error: ")
    assert "Traceback" not in done.err
    for text in said:
        assert text in done.err
