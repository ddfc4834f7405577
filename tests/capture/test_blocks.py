"""Repeated blocks are found by structure, and names do not matter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.ir.graph import Role, info
from tests.capture.helpers import Batch, assert_same_training, structure
from tests.models import (
    HEADS,
    HIDDEN,
    SEQ,
    VOCAB,
    Layer,
    TinyTransformer,
    next_token_loss,
    tiny_gpt2,
    tiny_llama,
    tiny_transformer,
    token_batch,
)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_all_layers_are_one_kind(build: Callable[..., tuple[nn.Module, Batch]]) -> None:
    model, batch = build(layers=3)
    graph = capture(model, batch)
    assert list(graph.multiplicity().values()) == [1, 3, 1]
    assert [block.kind for block in graph.blocks] == ["block0", *["block1"] * 3, "block2"]


def test_one_activation_passes_between_layers() -> None:
    model, batch, loss_fn = tiny_transformer(layers=3)
    graph = capture(model, batch, loss_fn=loss_fn)
    for block in graph.blocks[1:]:
        read = [value for value in block.bindings if value.role is Role.ACTIVATION]
        assert [value.name for value in read] == [f"{block.index - 1}:0"]


def test_every_call_has_facts_and_blocks_read_only_earlier_ones() -> None:
    model, batch = tiny_llama(layers=3)
    graph = capture(model, batch)
    for block in graph.blocks:
        kind = graph.kind_of(block)
        assert len(kind.placeholders) == len(kind.roles) == len(block.bindings)
        assert tuple(value.role for value in block.bindings) == kind.roles
        for value in block.bindings:
            if value.role is Role.ACTIVATION:
                assert graph.producer(value)[0] < block.index
        for node in kind.graph.nodes:
            if node.op == "call_function":
                assert info(node).source
                assert all(
                    isinstance(size, int) or size.free_symbols
                    for tensor in info(node).tensors
                    for size in tensor.shape
                )


def test_number_of_layers_does_not_change_the_kinds() -> None:
    few, batch = tiny_llama(layers=2)
    many, _ = tiny_llama(layers=12)
    first, second = capture(few, batch), capture(many, batch)
    assert first.kinds.keys() == second.kinds.keys()
    assert first.fingerprint != second.fingerprint
    for name, kind in first.kinds.items():
        assert [str(node.target) for node in kind.graph.nodes if node.op != "output"] == [
            str(node.target) for node in second.kinds[name].graph.nodes if node.op != "output"
        ]


class Renamed(nn.Module):
    """The hand-written transformer with other names for everything, its layers no list."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        source = TinyTransformer(layers)
        self.alpha = source.tokens
        self.beta = source.positions
        self.names = [f"omega_{index}" for index in range(layers)]
        for name, layer in zip(self.names, source.layers.children(), strict=True):
            self.add_module(name, _rename(layer))
        self.gamma = source.norm
        self.delta = source.head

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.alpha(tokens) + self.beta(positions)
        for name in self.names:
            x = getattr(self, name)(x)
        logits: Tensor = self.delta(self.gamma(x))
        return logits


class _RenamedLayer(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.a = layer.attention_norm
        self.b = layer.attention
        self.c = layer.mlp_norm
        self.d = layer.up
        self.e = layer.down

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(self.a(x))
        out: Tensor = x + self.e(F.gelu(self.d(self.c(x))))
        return out


def _rename(layer: nn.Module) -> nn.Module:
    assert isinstance(layer, Layer)
    return _RenamedLayer(layer)


def test_names_do_not_matter() -> None:
    model, batch, loss_fn = tiny_transformer(layers=3)
    graph = capture(model, batch, loss_fn=loss_fn)
    renamed = capture(Renamed(3), batch, loss_fn=loss_fn)
    assert structure(renamed) == structure(graph)
    assert renamed.fingerprint == graph.fingerprint
    assert "omega_1" in {block.path for block in renamed.blocks}


def test_fingerprint_is_stable_and_tells_models_apart() -> None:
    model, batch = tiny_llama()
    again, _ = tiny_llama(seed=1)
    other, _ = tiny_llama(rms_norm_eps=1e-3)
    graph = capture(model, batch)
    assert capture(again, batch).fingerprint == graph.fingerprint
    assert capture(other, batch).fingerprint != graph.fingerprint
    assert capture(model, batch, compute_dtype=torch.bfloat16).fingerprint != graph.fingerprint
    shorter = {name: tensor[:, :8] for name, tensor in batch.items()}
    assert capture(model, shorter).fingerprint != graph.fingerprint


class Windowed(nn.Module):
    """Layers that alternate between a narrow and a wide window of attention, as masks alone."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(WindowedLayer(4 if i % 2 else 8) for i in range(layers))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class WindowedLayer(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        query, key, value = (
            part.reshape(batch, seq, HEADS, hidden // HEADS).transpose(1, 2)
            for part in self.qkv(x).split(hidden, dim=-1)
        )
        at = torch.arange(seq, device=x.device)
        distance = at[:, None] - at[None, :]
        mask = (distance >= 0) & (distance < self.window)
        mask = mask.expand(batch, 1, seq, seq)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + mixed.transpose(1, 2).reshape(batch, seq, hidden)


def test_alternating_masks_are_two_kinds_in_turn() -> None:
    torch.manual_seed(0)
    tokens = token_batch()
    batch = {"tokens": tokens["input_ids"], "targets": tokens["labels"]}
    graph = assert_same_training(Windowed(4), batch, next_token_loss)
    assert [block.kind for block in graph.blocks[1:-1]] == ["block1", "block2"] * 2
    masks = [tensor for tensor in graph.constants.values() if tensor.dtype is torch.bool]
    assert [tuple(mask.shape) for mask in masks] == [(1, 1, SEQ, SEQ)] * 2


class _GluedLayers(nn.Module):
    """Residuals are added outside of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.GELU())
            for _ in range(4)
        )
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x)
        return logits


def test_residuals_outside_of_layers_belong_to_them() -> None:
    tokens = token_batch()
    batch = {"tokens": tokens["input_ids"], "targets": tokens["labels"]}
    graph = assert_same_training(_GluedLayers(), batch, next_token_loss)
    assert list(graph.multiplicity().values()) == [1, 4, 1]


def test_a_model_without_repetition_is_one_block() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    graph = capture(model, (torch.randn(2, 8),), loss_fn=lambda output, _: output.square().mean())
    assert [block.index for block in graph.blocks] == [0]
