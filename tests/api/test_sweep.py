"""``autopar.sweep``: every point is a plan's, and what goes wrong at one is told at that one."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ET
from typing import Any

import pytest

import autopar
from autopar import Cluster
from autopar.ir.errors import InputError
from tests.models import tiny_llama

CLUSTER = Cluster("cpu-local", gpus_per_node=2)
PIN: dict[str, int | str] = {"tp": 1, "recompute": "none"}


def sweep(over: Any, values: list[int], cluster: Cluster = CLUSTER, **pin: int) -> autopar.Sweep:
    given: Any = {} if over == "batch" else {"global_batch_size": 8}
    return autopar.sweep(tiny_llama(1)[0], cluster, over, values, pin={**PIN, **pin}, **given)


def plan(cluster: Cluster, batch: int, seq_len: int | None = None) -> autopar.Plan:
    return autopar.plan(
        tiny_llama(1)[0], cluster, global_batch_size=batch, seq_len=seq_len, pin=PIN
    )


@pytest.mark.parametrize(
    ("over", "values"), [("gpus", [1, 4]), ("batch", [4, 8]), ("length", [8, 16])]
)
def test_each_point_is_what_a_plan_says(over: Any, values: list[int]):
    found = sweep(over, values)
    assert [found.value(point) for point in found.points] == values
    for value, point in zip(values, found.points, strict=True):
        alone = plan(
            CLUSTER.with_gpus(value) if over == "gpus" else CLUSTER,
            value if over == "batch" else 8,
            value if over == "length" else None,
        )
        assert (point.step_s, point.mfu) == (alone.prediction.step_s, alone.prediction.mfu)
        assert point.tokens_per_s == alone.prediction.tokens_per_s
        assert point.peak_bytes == alone.prediction.fullest.peak_bytes
        assert point.bound_s == pytest.approx(alone.certificate.bound_s)
        assert point.error is None


def test_a_point_where_nothing_holds_or_fits_says_so_and_costs_no_other():
    held = sweep("batch", [3, 8], pp=1, dp_replicate=2)
    assert held.points[0].error == (
        "dp_replicate=2 is pinned, but 2 does not divide the global batch of 3 sequences"
    )
    assert held.points[1].step_s is not None
    large = sweep("length", [8, 16], CLUSTER.with_memory(400_000))
    assert {point.error for point in large.points} == {"does not fit into memory"}
    assert "does not fit into memory" in large.table()
    with pytest.raises(InputError, match="nothing to plot"):
        large.plot()


def test_a_sweep_is_a_table_csv_and_a_plot():
    found = sweep("gpus", [1, 2])
    lines = str(found).splitlines()
    assert lines[0].split()[:3] == ["GPUs", "step", "tokens/s"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2"]
    rows = list(csv.DictReader(io.StringIO(found.csv())))
    assert [float(row["step_s"]) for row in rows] == [point.step_s for point in found.points]
    drawing = ET.fromstring(found.plot())
    svg = "{http://www.w3.org/2000/svg}"
    panels = drawing.findall(f"{svg}svg")
    tops = [float(panel.attrib["y"]) for panel in panels]
    assert len(panels) == 4
    assert tops == sorted(set(tops))
    assert float(drawing.attrib["height"]) == tops[-1] + float(panels[-1].attrib["height"])
    assert len(panels[1].findall(f"{svg}circle")) == 2


@pytest.mark.parametrize(
    ("over", "values", "arguments", "said"),
    [
        ("ranks", [1], {}, "over is 'ranks'; it can be gpus, batch, length"),
        ("gpus", [], {}, "values are"),
        ("gpus", [0], {}, "values are"),
        ("gpus", [3], {}, "none of it is whole nodes of 2 GPUs"),
        ("batch", [4], {"global_batch_size": 8}, "global_batch_size is given"),
        ("length", [4], {"seq_len": 8}, "seq_len is given"),
        ("batch", [4], {"pin": {"tp": 3}}, "tp=3"),
    ],
)
def test_what_makes_no_sense_is_refused(over: Any, values: Any, arguments: Any, said: str):
    with pytest.raises(InputError, match=said):
        autopar.sweep(tiny_llama(1)[0], CLUSTER, over, values, **arguments)
