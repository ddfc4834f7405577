"""Pins of the training: what they say, and what they contradict."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from autopar import Cluster
from autopar.api.training_pins import training_pins
from autopar.ir.errors import InputError
from tests.models import tiny_llama

CLUSTER = Cluster("a100-80gb", gpus_per_node=2)
NOTHING_GIVEN: dict[str, Any] = {"precision": None, "gradient_dtype": None, "reduce_dtype": None}


@pytest.mark.parametrize(
    ("pin", "settings"),
    [
        ({}, {}),
        ({"precision": "fp16"}, {"precision": "fp16"}),
        ({"grads_fp32": 1}, {"gradient_dtype": "fp32"}),
        ({"grads_fp32": 0}, {"gradient_dtype": "bf16"}),
        ({"comm_precision": "half"}, {"reduce_dtype": "bf16"}),
        ({"comm_precision": "fp32"}, {"reduce_dtype": "fp32"}),
        (
            {"precision": "fp16", "grads_fp32": 0, "comm_precision": "half"},
            {"precision": "fp16", "gradient_dtype": "fp16", "reduce_dtype": "fp16"},
        ),
        (
            {"precision": "float64", "grads_fp32": 1},
            {"precision": "float64", "gradient_dtype": "float64"},
        ),
    ],
)
def test_pins_become_settings_and_the_rest_is_left(
    pin: dict[str, Any], settings: dict[str, str]
) -> None:
    found = training_pins({**pin, "tp": 2}, NOTHING_GIVEN, "bf16")
    assert found == (settings, {"tp": 2})


@pytest.mark.parametrize(
    ("pin", "given", "said"),
    [
        ({"precision": "fp16"}, {"precision": "bf16"}, "'fp16' is pinned, but precision is bf16"),
        ({"grads_fp32": 1}, {"gradient_dtype": "bf16"}, "grads_fp32=1 is pinned"),
        ({"grads_fp32": 0}, {"gradient_dtype": "fp32"}, "but gradient_dtype is fp32"),
        ({"comm_precision": "half"}, {"reduce_dtype": "fp32"}, "but reduce_dtype is fp32"),
        ({"comm_precision": "half"}, {"precision": "fp32"}, "but compute is fp32"),
        ({"precision": "int8"}, {}, "it can be bf16 or fp16 or fp32 or float64"),
        ({"comm_precision": "bf16"}, {}, "it can be half or fp32"),
        ({"grads_fp32": 2}, {}, "grads_fp32=2 is pinned; it can be 0 or 1"),
        ({"grads_fp32": True}, {}, "grads_fp32=True is pinned"),
    ],
)
def test_what_cannot_hold_is_refused(pin: dict[str, Any], given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        training_pins(pin, {**NOTHING_GIVEN, **given}, "bf16")


def test_an_argument_that_says_the_same_is_no_contradiction() -> None:
    given: Any = {"precision": "fp16", "gradient_dtype": "fp32", "reduce_dtype": "fp16"}
    pin: dict[str, int | str] = {"precision": "fp16", "grads_fp32": 1, "comm_precision": "half"}
    assert training_pins(pin, given, "bf16") == (given, {})


def test_a_plan_trains_as_it_is_pinned() -> None:
    pin: dict[str, int | str] = {
        "precision": "fp16",
        "comm_precision": "half",
        "grads_fp32": 1,
        "tp": 2,
    }
    plan = autopar.plan(tiny_llama(1)[0], CLUSTER, pin=pin)
    training = plan.training
    assert (training.precision, training.gradient_dtype) == ("fp16", "fp32")
    assert training.reduce_dtype == "fp16"
    assert plan.pins == {"tp": 2}
