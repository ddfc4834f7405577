"""``autopar diff``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.helpers import SIZES, assert_refused, run


def test_two_plans_are_put_side_by_side(
    capfd: pytest.CaptureFixture[str], config: Path, plan_file: Path, tmp_path: Path
):
    other = tmp_path / "other.json"
    run(capfd, "plan", config, *SIZES, "--gpus-per-node", 2, "--tp", 1, "-o", other)
    done = run(capfd, "diff", plan_file, other)
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert any(line.split() == ["tp", "2", "1"] for line in lines)
    assert any(line.split() == ["predicted", "plan", "other"] for line in lines)
    document = json.loads(run(capfd, "diff", plan_file, other, "--json").out)
    decided = {found["name"]: (found["one"], found["other"]) for found in document["decisions"]}
    assert decided["pinned tp"] == ("2", "1")


def test_what_is_no_plan_is_refused(
    capfd: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path
):
    missing = tmp_path / "none.json"
    assert_refused(run(capfd, "diff", plan_file, missing), "none.json", "cannot read")
