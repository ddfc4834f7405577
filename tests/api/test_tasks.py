"""Models that are no causal language models are planned from their configs, and found again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar import Cluster, plan
from autopar.api.data import synthetic_batches
from autopar.api.planning import capture_source, plan_source

T5 = {
    "model_type": "t5",
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 64,
    "decoder_start_token_id": 0,
}
VIT = {
    "model_type": "vit",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 8,
    "patch_size": 4,
    "id2label": {str(label): str(label) for label in range(5)},
}


@pytest.mark.parametrize(
    ("settings", "seq_len", "shapes", "classes"),
    [
        (T5, 12, {"input_ids": (4, 12), "labels": (4, 12)}, 64),
        (VIT, None, {"pixel_values": (4, 3, 8, 8), "labels": (4,)}, 5),
    ],
)
def test_a_plan_finds_its_model_and_batches_again(
    settings: dict[str, Any],
    seq_len: int | None,
    shapes: dict[str, tuple[int, ...]],
    classes: int,
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    ones = {"pp": 1, "dp_shard": 1, "dp_replicate": 1}
    cluster = Cluster("cpu-local", gpus_per_node=2)
    planned = plan(tmp_path, cluster, global_batch_size=4, seq_len=seq_len, pin={**ones, "tp": 2})
    assert planned.model.seq_len == seq_len
    graph = capture_source(plan_source(planned), planned)
    assert graph.fingerprint == planned.model.fingerprint
    batch = next(synthetic_batches(planned))
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == shapes
    assert 2 <= batch["labels"].max() < classes
