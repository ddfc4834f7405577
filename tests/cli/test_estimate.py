"""`autopar estimate`: a table of estimates, whole or not at all, and what is wrong with rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from autopar.estimation.predictions import COLUMNS
from tests.cli.helpers import assert_refused, run

ROW: dict[str, Any] = {
    "id": "one",
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "vocab": 128,
    "seq": 32,
    "world_size": 2,
    "global_batch": 8,
    "micro_batch": 1,
    "tp": 1,
    "pp": 1,
}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Two rows that are good, one that cannot be read, and one that cannot be estimated."""
    return write(
        tmp_path / "rows.csv",
        ROW,
        {**ROW, "id": "two", "tp": 2},
        {**ROW, "id": "three", "heads": 5},
        {**ROW, "id": "four", "world_size": 16, "pp": 16},
    )


def write(path: Path, *rows: dict[str, Any]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_each_row_that_can_be_read_has_a_line(
    rows: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = rows.parent / "pred.csv"
    output.write_text("old")
    done = run(capfd, "estimate", rows, "-o", output, "--jobs", 1)
    assert done.status == 1
    assert done.out.startswith(f"{output}: 2 rows of 1 model estimated in ")
    assert done.err.splitlines() == [
        "autopar: 2 rows have no estimate:",
        "  row 4 (three): heads=5 does not divide hidden=64",
        "  row 5 (four): pp=16 is pinned, but the model has 4 blocks",
    ]
    with output.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["id"] for row in found] == ["one", "two", "four"]
    assert tuple(found[0])[: len(COLUMNS)] == COLUMNS
    assert [row["error"] for row in found] == [
        "",
        "",
        "pp=16 is pinned, but the model has 4 blocks",
    ]
    assert set(found[2].values()) == {"", "four", found[2]["error"]}
    assert all(float(row["pred_time_s"]) > 0 for row in found[:2])
    assert sorted(file.name for file in rows.parent.iterdir()) == ["pred.csv", "rows.csv"]


def test_good_rows_are_printed_where_no_file_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = run(capfd, "estimate", write(tmp_path / "rows.csv", ROW), "--jobs", 1)
    assert (done.status, done.err) == (0, "")
    (read,) = csv.DictReader(done.out.splitlines())
    output = tmp_path / "pred.csv"
    document = run(
        capfd, "estimate", tmp_path / "rows.csv", "--jobs", 1, "--json", "-o", output
    ).out
    (record,) = json.loads(document)
    assert {name: str(value) for name, value in record.items()} == read
    assert output.read_text() == done.out


@pytest.mark.parametrize("place", ["nowhere/pred.csv", "."])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    place: str, rows: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.api.estimate_rows", lambda *_, **__: pytest.fail("estimated"))
    done = run(capfd, "estimate", rows, "-o", rows.parent / place)
    assert_refused(done, "cannot write the estimates", str(rows.parent / place))


def test_the_rows_are_not_replaced(rows: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = rows.read_text()
    assert_refused(run(capfd, "estimate", rows, "-o", rows), "the estimates would replace the rows")
    assert rows.read_text() == text


def test_what_is_no_table_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for text, said in (("", "the table is empty"), ("id,hidden\n1,2\n", "has no column layers")):
        (tmp_path / "rows.csv").write_text(text)
        assert_refused(run(capfd, "estimate", tmp_path / "rows.csv"), said)
    assert_refused(run(capfd, "estimate", tmp_path / "no.csv"), "cannot read the rows", "no.csv")


def test_jobs_are_at_least_one(rows: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_refused(run(capfd, "estimate", rows, "--jobs", 0), "jobs is 0; it must be at least 1")


def test_a_table_of_wrong_rows_names_some_and_counts_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = [{**ROW, "id": f"r{number}", "tp": 0} for number in range(30)]
    done = run(capfd, "estimate", write(tmp_path / "rows.csv", *wrong))
    assert done.status == 1
    lines = done.err.splitlines()
    assert lines[0] == "autopar: 30 rows have no estimate:"
    assert lines[1] == "  row 2 (r0): tp is '0'; allowed: a whole number from 1 on"
    assert (len(lines), lines[-1]) == (22, "  and 10 more")
    assert done.out == ",".join(COLUMNS) + "\n"
