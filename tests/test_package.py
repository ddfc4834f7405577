"""The package as a whole: its version, what importing it loads, and where its folders lie."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import autopar

ROOT = Path(__file__).parents[1]


def test_version_is_the_installed_one() -> None:
    assert version("autopar") == autopar.__version__


@pytest.mark.parametrize("module", ["autopar", "autopar.cli"])
def test_import_loads_neither_torch_nor_ortools(module: str) -> None:
    code = f"import sys, {module}; print({{'torch', 'ortools'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("folder", ["passes", "solver", "runtime"])
def test_top_level_folder_is_a_subpackage(folder: str) -> None:
    link = ROOT / "autopar" / folder
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == ROOT / folder
    assert (link / "__init__.py").is_file()
