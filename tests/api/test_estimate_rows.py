"""Estimates of a table: each is that of its layout alone, and an error costs no other row."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import Cluster
from autopar.api import estimate_rows
from autopar.estimation import EstimateRow, ModelShape, cluster_of, pins_of, settings_of
from autopar.estimation.predictions import COLUMNS, Record
from autopar.ir.errors import InputError
from tests.rows import estimate_row

SHAPE = ModelShape(
    hidden=64, layers=4, heads=4, kv_heads=2, ffn=128, mlp="swiglu", vocab=128, seq=32
)
GPT = ModelShape(hidden=64, layers=3, heads=4, kv_heads=4, ffn=256, mlp="gelu4h", vocab=96, seq=32)


def row(number: int, shape: ModelShape = SHAPE, **changes: Any) -> EstimateRow:
    base = estimate_row(
        shape, row=number, id=f"row-{number}", world_size=16, global_batch=32, dp=16
    )
    return replace(base, **changes)


ROWS = (
    row(2),
    row(3, tp=2, dp=8, seq_parallel=True, micro_batch=2),
    row(4, GPT, pp=2, dp=8, act_ckpt="full", kernel="eager"),
    row(5, tp=2, pp=2, dp=4, vpp=2, zero_stage=1, zero_shard=4),
    row(6, node_net_gbps=100),
    row(7, precision="fp16", grads_fp32=True, comm_precision="fp32"),
    row(8, tp=2, dp=8, seq_parallel=True, micro_batch=2, act_ckpt="selective"),
    row(9, GPT, world_size=4, dp=4, zero_stage=3, zero_shard=4),
)
IMPOSSIBLE = row(10, pp=16, dp=1)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return estimate_rows((*ROWS, IMPOSSIBLE), jobs=1)


def test_records_are_in_the_order_of_the_rows(records: list[Record]) -> None:
    assert [record["id"] for record in records] == [f"row-{n}" for n in range(2, 11)]


def test_a_row_that_cannot_be_costs_no_other_row(records: list[Record]) -> None:
    assert [bool(record["error"]) for record in records] == [False] * 8 + [True]
    assert records[-1] == {
        "id": "row-10",
        "error": "pp=16 is pinned, but the model has 6 blocks",
    }


@pytest.mark.parametrize("number", [1, 4])
def test_an_estimate_depends_on_no_other_row(records: list[Record], number: int) -> None:
    assert estimate_rows([ROWS[number]], jobs=1) == [records[number]]


def test_the_order_of_rows_changes_no_estimate(records: list[Record]) -> None:
    assert estimate_rows(ROWS[4::-1], jobs=1) == records[4::-1]


@pytest.mark.parametrize("number", [2, 6])
def test_an_estimate_is_that_of_the_same_model_and_pins(
    records: list[Record], number: int, tmp_path: Path
) -> None:
    one = ROWS[number]
    model = tmp_path / "config.json"
    model.write_text(json.dumps(settings_of(one.shape)))
    found = autopar.estimate(
        model, cluster_of(one), pins_of(one), global_batch_size=32, seq_len=one.shape.seq
    )
    record = records[number]
    assert (record["pred_time_s"], record["pred_oom"]) == (found.step_s, 0)
    assert record["pred_mem_gib"] == found.reserved_bytes / 2**30


def test_a_plan_with_the_pins_of_a_row_predicts_its_estimate(
    records: list[Record], tmp_path: Path
) -> None:
    one = ROWS[3]
    model = tmp_path / "config.json"
    model.write_text(json.dumps(settings_of(one.shape)))
    plan = autopar.plan(
        model, cluster_of(one), pin=pins_of(one), global_batch_size=32, seq_len=one.shape.seq
    )
    assert records[3]["pred_time_s"] == pytest.approx(plan.prediction.step_s, rel=1e-9)


def test_a_breakdown_has_all_of_the_time_and_the_memory(records: list[Record]) -> None:
    for record in records[:-1]:
        parts = {name: float(record[name]) for name in record if name not in COLUMNS}
        seconds = [value for name, value in parts.items() if name.endswith("_s")]
        sizes = [value for name, value in parts.items() if name.endswith("_gib")]
        assert len(seconds) + len(sizes) == len(parts)
        assert sum(seconds) == pytest.approx(float(record["pred_time_s"]), rel=1e-6)
        memory = Cluster("a100-80gb").hardware.memory
        held = (sum(sizes) - memory.context_bytes / 2**30) * memory.reserve
        assert sum(sizes) + held == pytest.approx(float(record["pred_mem_gib"]), rel=1e-6)
        assert min(parts.values()) >= 0


def test_every_column_is_documented(records: list[Record]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "rows.md").read_text()
    columns, _, causes = page.partition("## Estimates of a table")[2].partition("| seconds |")
    assert set(COLUMNS) <= set(re.findall(r"`(\w+)`", columns))
    assert set(re.findall(r"`(\w+)`", causes)) == set(records[0]) - set(COLUMNS)


def test_a_slower_network_costs_time(records: list[Record]) -> None:
    assert float(records[4]["pred_time_s"]) > float(records[0]["pred_time_s"])


@pytest.mark.slow
def test_processes_estimate_as_one_does(records: list[Record]) -> None:
    """Slow: processes of their own import torch and transformers."""
    done: list[int] = []
    rows = (ROWS[0], replace(ROWS[2], row=2), IMPOSSIBLE)  # of two files
    expected = [records[0], records[2], records[-1]]
    assert estimate_rows(rows, jobs=2, progress=done.append) == expected
    assert (done[0], done[-1]) == (0, 3)


def test_jobs_are_at_least_one() -> None:
    with pytest.raises(InputError, match="jobs is 0"):
        estimate_rows(ROWS, jobs=0)


def test_nothing_is_estimated_of_no_rows() -> None:
    assert estimate_rows([]) == []
