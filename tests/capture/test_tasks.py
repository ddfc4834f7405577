"""A config says what it is trained for: model class, inputs and attention follow from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.capture import capture, open_model
from autopar.capture.sources import ConfigSource
from autopar.ir.errors import InputError
from autopar.ir.graph import LossKind

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
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
BERT = {"model_type": "bert", **SMALL, "intermediate_size": 48, "max_position_embeddings": 16}
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
BLOOM = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
GEMMA2 = {
    "model_type": "gemma2",
    **SMALL,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
}


def source(tmp_path: Path, **settings: Any) -> ConfigSource:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings))
    opened = open_model(file)
    assert isinstance(opened, ConfigSource)
    return opened


def shapes(source: ConfigSource, seq_len: int | None) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in source.example_inputs(seq_len).items()}


TEXT = {"input_ids": (2, 12), "labels": (2, 12)}
CLASSES = {"input_ids": (2, 12), "labels": (2,)}
IMAGES = {"pixel_values": (2, 3, 8, 8), "labels": (2,)}


@pytest.mark.parametrize(
    ("settings", "model", "inputs", "bound"),
    [
        (T5, "T5ForConditionalGeneration", TEXT, 64),
        (BERT, "BertForMaskedLM", TEXT, 64),
        ({**BERT, "architectures": ["BertModel"]}, "BertForMaskedLM", TEXT, 64),
        (
            {**BERT, "architectures": ["BertForSequenceClassification"]},
            "BertForSequenceClassification",
            CLASSES,
            2,
        ),
        (
            {**BERT, "architectures": ["BertForTokenClassification"]},
            "BertForTokenClassification",
            TEXT,
            2,
        ),
        (VIT, "ViTForImageClassification", IMAGES, 5),
        (BLOOM, "BloomForCausalLM", TEXT, 64),
        (GEMMA2, "Gemma2ForCausalLM", TEXT, 64),
    ],
)
def test_a_config_captures_as_what_it_is_trained_for(
    settings: dict[str, Any],
    model: str,
    inputs: dict[str, tuple[int, ...]],
    bound: int,
    tmp_path: Path,
) -> None:
    opened = source(tmp_path, **settings)
    seq_len = None if "pixel_values" in inputs else 12
    module = opened.build()
    assert type(module).__name__ == model
    assert shapes(opened, seq_len) == inputs
    assert opened.integer_bound("labels") == bound
    graph = capture(module, opened.example_inputs(seq_len))
    assert graph.loss_kind is LossKind.TOKEN_SUM
    assert len(graph.blocks) >= 4
    in_memory = open_model(module).example_inputs(seq_len)
    assert {name: tuple(t.shape) for name, t in in_memory.items()} == inputs


@pytest.mark.parametrize(
    ("settings", "attention"),
    [
        (BERT, "sdpa"),
        ({**BERT, "attn_implementation": "eager"}, "eager"),
        (GEMMA2, "eager"),  # soft caps are beyond the fused kernel
        (BLOOM, "eager"),
    ],
)
def test_attention_is_fused_where_the_family_has_it(
    settings: dict[str, Any], attention: str, tmp_path: Path
) -> None:
    module: Any = source(tmp_path, **settings).build()
    assert module.config._attn_implementation == attention


def test_lengths_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="longer than the model's 16 positions"):
        source(tmp_path, **BERT).example_inputs(17)
    with pytest.raises(InputError, match="no usable sequence length"):
        source(tmp_path, **T5).example_inputs()  # relative positions have no end
    with pytest.raises(InputError, match="takes images, whose size is that of the config"):
        source(tmp_path, **VIT).example_inputs(12)


def test_a_model_without_a_loss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no model of model_type 'encodec'"):
        source(tmp_path, model_type="encodec")


def test_weights_are_float32_whatever_the_config_says(tmp_path: Path) -> None:
    module = source(tmp_path, **BERT, dtype="bfloat16").build(device="cpu")
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
