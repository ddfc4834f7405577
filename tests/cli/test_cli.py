"""`autopar` without a subcommand: help, version, and usage errors."""

import subprocess
import sys

import pytest

from autopar import __version__, cli


def test_help_loads_neither_torch_nor_ortools() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "autopar", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: autopar")
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in loaded
    assert not {"torch", "ortools"} & loaded


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
