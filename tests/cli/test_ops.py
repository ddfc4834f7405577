"""``autopar ops``: the table, and the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.helpers import assert_refused, run, write_config


def test_ops_lists_each_op_with_its_count_and_rule(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = write_config(tmp_path / "model")
    done = run(capfd, "ops", model, "--seq-len", 16, "--cluster", "cpu-local")
    assert done.status == 0, done.err
    rows = [line.split(maxsplit=2) for line in done.out.splitlines() if line.startswith("aten.")]
    assert ["aten.linear.default", "15", "b1 b0 k, n k -> b1 b0 n"] in rows  # 2 layers of 7, head
    assert done.out.rstrip().endswith(
        "100.0% of ops have a rule; rules split 100.00% of matmul FLOPs at tp 2"
    )


def test_ops_as_json_says_the_same(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = write_config(tmp_path / "model")
    done = run(capfd, "ops", model, "--seq-len", 16, "--json")
    document = json.loads(done.out)
    assert document["without_rule"] == []
    assert document["split_flops_fraction"] == 1
    linear = [entry for entry in document["ops"] if entry["op"] == "aten.linear.default"]
    assert linear == [{"op": "aten.linear.default", "count": 15, "rule": "b1 b0 k, n k -> b1 b0 n"}]


def test_an_op_without_a_rule_is_told_with_its_cost_and_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return torch.cummax(super().forward(x), -1).values.mean()\n"
        "def model():\n"
        "    return Model(8, 8), {'x': torch.zeros(4, 8)}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    done = run(capfd, "ops", "mine:model")
    assert done.status == 0, done.err
    (row,) = (line for line in done.out.splitlines() if line.startswith("aten.cummax"))
    assert "none: replicated, costs" in row
    assert "mine.py:4" in row
    assert done.out.rstrip().endswith("see autopar.register_rule")
    document = json.loads(run(capfd, "ops", "mine:model", "--json").out)
    assert [entry["op"] for entry in document["without_rule"]] == ["aten.cummax.default"]
    assert document["without_rule"][0]["replicated_seconds"] > 0


def test_a_wrong_sequence_length_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = write_config(tmp_path / "model")
    assert_refused(run(capfd, "ops", model, "--seq-len", 0), "seq_len is 0")
