"""The model of a row has exactly the sizes that the row says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.capture import capture, open_model
from autopar.capture.sources import ModelSource
from autopar.estimation import ModelShape, open_shape, settings_of
from autopar.ir.errors import InputError
from autopar.ir.graph import ModelGraph

LLAMA = ModelShape(
    hidden=48, layers=3, heads=6, kv_heads=2, ffn=100, mlp="swiglu", vocab=101, seq=24
)
GPT2 = ModelShape(
    hidden=48, layers=3, heads=6, kv_heads=6, ffn=200, mlp="gelu4h", vocab=101, seq=24
)


def captured(source: ModelSource) -> ModelGraph:
    return capture(source.build(), source.example_inputs(), loss_fn=source.loss_fn)


def num_parameters(graph: ModelGraph) -> int:
    return sum(math.prod(parameter.shape) for parameter in graph.parameters.values())


def test_a_llama_has_the_sizes_of_its_row() -> None:
    of, graph = LLAMA, captured(open_shape(LLAMA))
    head = of.hidden // of.heads
    attention = of.hidden * head * (2 * of.heads + 2 * of.kv_heads)
    layer = attention + 3 * of.hidden * of.ffn + 2 * of.hidden
    assert num_parameters(graph) == of.layers * layer + 2 * of.vocab * of.hidden + of.hidden
    assert {info.shape[1] for info in graph.inputs.values()} == {of.seq}


def test_a_gpt2_has_the_sizes_of_its_row_and_a_tied_head() -> None:
    of, graph = GPT2, captured(open_shape(GPT2))
    attention = 4 * of.hidden**2 + 4 * of.hidden
    mlp = 2 * of.hidden * of.ffn + of.ffn + of.hidden
    layer = attention + mlp + 4 * of.hidden
    embeddings = (of.vocab + of.seq) * of.hidden
    assert num_parameters(graph) == of.layers * layer + embeddings + 2 * of.hidden
    ops = {str(node.target) for kind in graph.kinds.values() for node in kind.graph.nodes}
    assert "aten.gelu.default" in ops
    assert not any("dropout" in op for op in ops)


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_row_is_captured_as_the_same_config_in_a_file(shape: ModelShape, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings_of(shape)))
    ours, theirs = captured(open_shape(shape)), captured(open_model(file))
    assert ours.fingerprint == theirs.fingerprint
    assert [block.kind for block in ours.blocks] == [block.kind for block in theirs.blocks]


def test_a_shape_has_a_name_and_no_file() -> None:
    source = open_shape(LLAMA)
    assert (source.name, source.spec) == ("llama-3x48-24", None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heads": 5}, "heads=5 does not divide hidden=48"),
        ({"kv_heads": 4}, "kv_heads=4 does not divide heads=6"),
        ({"heads": 16, "kv_heads": 16}, "need an even number"),
        ({"mlp": "gelu4h"}, "no grouped heads"),
    ],
)
def test_a_shape_that_no_model_has_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(LLAMA, **changed)
