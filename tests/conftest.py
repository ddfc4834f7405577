"""Settings every test shares: the hypothesis profiles.

`ci` (the default) draws the same examples on every run. `HYPOTHESIS_PROFILE=stress`, which
`make stress` sets, searches at random and prints what reproduces a failure.
"""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=50,
    # How fast inputs are drawn depends on the machine's load, which says nothing about the code.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "stress",
    deadline=None,
    max_examples=1000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Compiling chains takes long: their ops run one by one, but in the test of compiling.
os.environ.setdefault("AUTOPAR_CHAIN_COMPILER", "none")


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A test closes the engine it made: a group left open would change what later tests see."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("the test left its process group open")
