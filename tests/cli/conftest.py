"""Plans that several tests of the command read, each made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar import cli
from tests.cli.helpers import SIZES, write_config


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny Llama's config."""
    return write_config(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def plan_file(config: Path) -> Path:
    """A plan for 2 tensor-parallel ranks, in fp32."""
    path = config.parent / "plan.json"
    arguments = ["plan", config, *SIZES, "--gpus-per-node", 2, "--tp", 2, "--precision", "fp32"]
    assert cli.main([*map(str, arguments), "-o", str(path)]) == 0
    return path
