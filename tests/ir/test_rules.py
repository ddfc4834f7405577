"""Every rule is proved on random shapes, and the prover catches wrong ones."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.ir.rules import registry
from autopar.testing.prove import Sample, prove, prove_jointly
from tests.ir.samples import SAMPLES, Source


@pytest.fixture(autouse=True, scope="module")
def _quiet_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_every_option_computes_what_the_op_computes(name: str) -> None:
    @settings(max_examples=max(8, settings().max_examples // 6))
    @given(st.integers(2, 4), st.data())
    def every_option(axis_size: int, data: st.DataObject) -> None:
        prove(SAMPLES[name](Source(data.draw, axis_size)), axis_size)

    every_option()


def _floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


FOUND_BY_SEARCH = {
    "a mask is broadcast over grouped heads": Sample(
        target=torch.ops.aten.scaled_dot_product_attention.default,
        args=(_floats(2, 4, 2, 2), _floats(2, 2, 2, 2), _floats(2, 2, 2, 2), _floats(2, 1, 2, 2)),
        kwargs={"enable_gqa": True},
    ),
    "narrow takes a whole dim": Sample(
        target=torch.ops.aten.narrow.default, args=(_floats(4, 4), 1, 0, 4)
    ),
}


@pytest.mark.parametrize("what", sorted(FOUND_BY_SEARCH))
def test_what_a_search_found_is_right(what: str) -> None:
    prove(FOUND_BY_SEARCH[what], 2)
    prove_jointly(FOUND_BY_SEARCH[what], (2, 2))


_JOINT = (
    "linear",
    "addmm",
    "matmul",
    "reshape",
    "split_with_sizes",
    "scaled_dot_product_attention",
    "embedding",
    "token_loss",
    "mean.dim",
    "add.Tensor",
    "repeat",
    "routed_experts",
    "conv2d",
    "scatter_add",
    "cross_entropy_loss",
    "mse_loss",
)


@pytest.mark.parametrize("name", _JOINT)
def test_options_on_two_axes_compute_what_the_op_computes(name: str) -> None:
    @settings(max_examples=max(4, settings().max_examples // 12))
    @given(st.sampled_from([(2, 2), (2, 3)]), st.data())
    def every_pair(sizes: tuple[int, int], data: st.DataObject) -> None:
        prove_jointly(SAMPLES[name](Source(data.draw, math.prod(sizes))), sizes)

    every_pair()


def test_every_rule_function_is_proved_on_some_op() -> None:
    """Ops that share a function differ in nothing that it looks at, or have their own samples."""
    proved = {name.split()[0].split(".")[0] for name in SAMPLES}
    functions = {
        function: {
            getattr(target, "__name__", "").split(".")[0]
            for target, other in registry.registered().items()
            if other is function
        }
        for function in registry.registered().values()
        if function.__module__.startswith("autopar.")
    }
    unproved = [targets for targets in functions.values() if not targets & proved]
    assert unproved == []
