"""`autopar`: help, version, usage errors, and the commands that only read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autopar import __version__, cli, read_plan
from autopar.cli.explain import PARTS
from autopar.ir.plan import json_schema
from tests.cli.helpers import run

COMMANDS = ("plan", "explain", "simulate", "run", "schema")


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], *([c, "--help"] for c in COMMANDS)]
)
def test_help_and_version_load_neither_torch_nor_ortools(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "autopar", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shown = "autopar " if arguments == ["--version"] else "usage: autopar"
    assert done.stdout.startswith(shown)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in loaded
    assert not {"torch", "ortools"} & loaded


def test_a_plan_is_explained(plan_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = read_plan(plan_file)
    assert run(capfd, "explain", plan_file).out == plan.explain() + "\n"
    for text in ("pipeline 1 × data 1 (replicate) × 1 (shard) × tensor 2", "pinned", "tp=2"):
        assert text in plan.explain()
    document = json.loads(run(capfd, "explain", plan_file, "--json").out)
    whole = json.loads(plan_file.read_text())
    assert document == {key: whole[key] for key in PARTS}


def test_schema_is_the_plans(capfd: pytest.CaptureFixture[str]) -> None:
    done = run(capfd, "schema")
    assert json.loads(done.out) == json_schema()
    assert (done.status, done.err) == (0, "")


def test_no_command_shows_help(capfd: pytest.CaptureFixture[str]) -> None:
    done = run(capfd)
    assert done.status == 2
    assert done.out.startswith("usage: autopar")


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"autopar {__version__}\n"


def test_unknown_flag_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--no-such-flag"])
    assert stop.value.code == 2
    assert "unrecognized arguments: --no-such-flag" in capsys.readouterr().err
