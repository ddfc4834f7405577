"""``autopar.estimate``: what ``plan`` predicts with the same pins, also where it does not fit."""

from __future__ import annotations

from dataclasses import asdict

import pytest

import autopar
from autopar import Cluster
from autopar.ir.errors import InputError
from tests.models import tiny_gpt2, tiny_llama

CLUSTER = Cluster("a100-80gb", gpus_per_node=8)
LAYOUT: dict[str, int | str] = {
    "pp": 1,
    "dp_replicate": 8,
    "dp_shard": 1,
    "tp": 1,
    "micro_batch_size": 2,
    "zero_stage": 0,
    "recompute": "none",
    "schedule": "1f1b",
    "cuts": "even",
    "kernel": "flash_attention2",
    "sequence_parallel": 0,
    "precision": "bf16",
    "comm_precision": "half",
    "grads_fp32": 0,
}
LAYOUTS: dict[str, dict[str, int | str]] = {
    "data": {},
    "tensor and sequence": {"dp_replicate": 1, "tp": 4, "pp": 2, "sequence_parallel": 1},
    "pipeline, eager, recomputed": {
        "dp_replicate": 4,
        "pp": 2,
        "kernel": "eager",
        "recompute": "full",
        "precision": "fp16",
    },
    "virtual stages": {
        "dp_replicate": 4,
        "pp": 2,
        "micro_batch_size": 1,
        "schedule": "interleaved",
        "virtual_stages": 2,
    },
    "ZeRO 1, some recomputed": {
        "dp_replicate": 1,
        "dp_shard": 4,
        "tp": 2,
        "zero_stage": 1,
        "recompute": "selective",
        "grads_fp32": 1,
    },
    "ZeRO 3": {
        "dp_replicate": 2,
        "dp_shard": 4,
        "zero_stage": 3,
        "schedule": "layered",
        "comm_precision": "fp32",
        "kernel": "fused_softmax + fused pointwise",
    },
    "tensor, and cuts as is best": {"dp_replicate": 2, "tp": 2, "pp": 2, "cuts": "balanced"},
}

OF_ANOTHER_FAMILY = ("ZeRO 3", "pipeline, eager, recomputed")


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_estimate_is_the_prediction_of_the_plan(name: str) -> None:
    model = tiny_gpt2 if name in OF_ANOTHER_FAMILY else tiny_llama
    module, layout = model(4)[0], {**LAYOUT, **LAYOUTS[name]}
    plan = autopar.plan(module, CLUSTER, pin=layout, global_batch_size=32)
    found = autopar.estimate(module, CLUSTER, layout, global_batch_size=32)
    assert found.fits
    assert found.peak_bytes == plan.prediction.fullest.peak_bytes
    assert (found.step_s, found.mfu, found.tokens_per_s) == pytest.approx(
        (plan.prediction.step_s, plan.prediction.mfu, plan.prediction.tokens_per_s), rel=1e-9
    )
    for ours, theirs in zip(found.prediction.ranks, plan.prediction.ranks, strict=True):
        assert asdict(ours) == {
            **asdict(theirs),
            "seconds_by_cause": pytest.approx(theirs.seconds_by_cause, rel=1e-9, abs=1e-15),
        }


def test_what_does_not_fit_is_estimated_and_says_by_how_much() -> None:
    small = Cluster("cpu-local", gpus_per_node=8)
    batch = 2**22
    pins = {**LAYOUT, "precision": "fp32", "comm_precision": "fp32", "micro_batch_size": batch // 8}
    with pytest.raises(autopar.AutoparError):
        autopar.plan(tiny_llama(2)[0], small, pin=pins, global_batch_size=batch)
    found = autopar.estimate(tiny_llama(2)[0], small, pins, global_batch_size=batch)
    assert not found.fits
    assert found.peak_bytes > found.usable_bytes
    assert "does not fit: " in str(found)
    assert " too much" in str(found)


def test_an_estimate_prints_itself_from_its_parts() -> None:
    layout = {**LAYOUT, **LAYOUTS["tensor and sequence"]}
    found = autopar.estimate(tiny_llama(4)[0], CLUSTER, layout, global_batch_size=32)
    text = str(found)
    assert text == found.explain()
    assert text.startswith("LlamaForCausalLM on 8 of 8 × a100-80gb\n")
    assert " fits: " in text
    for cause, seconds in found.seconds_by_cause.items():
        assert (f"\n  {cause} " in text) == (seconds > 0)
    for cause, num_bytes in found.bytes_by_cause.items():
        assert (f"\n  {cause} " in text) == (num_bytes > 0)
    assert sum(found.bytes_by_cause.values()) == found.peak_bytes
    assert sum(found.seconds_by_cause.values()) == pytest.approx(found.step_s, rel=1e-6)


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        (("tp", "pp", "dp_replicate"), ("tp", "pp", "dp_replicate")),
        (("micro_batch_size",), ("micro_batch_size",)),
        (("recompute", "schedule"), ("recompute", "schedule")),
        (("dp_replicate", "dp_shard", "zero_stage"), ("dp_replicate", "dp_shard", "zero_stage")),
    ],
)
def test_what_a_layout_leaves_open_is_named(
    left_out: tuple[str, ...], named: tuple[str, ...]
) -> None:
    layout = {name: value for name, value in LAYOUT.items() if name not in left_out}
    with pytest.raises(InputError, match="open") as refused:
        autopar.estimate(tiny_llama(2)[0], CLUSTER, layout, global_batch_size=32)
    assert all(name in refused.value.what for name in named)


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"tp": 3}, "tp=3"),
        ({"colour": "red"}, "nothing is called 'colour'"),
        ({"kernel": "fastest"}, "no kernels are called 'fastest'"),
        ({"precision": "int8"}, "precision='int8' is pinned"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_the_model_is_captured(
    pins: dict[str, int | str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.api.planning.capture", lambda *_, **__: pytest.fail("captured"))
    with pytest.raises(InputError, match=said):
        autopar.estimate(tiny_llama(2)[0], CLUSTER, {**LAYOUT, **pins}, global_batch_size=32)
