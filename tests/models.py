"""Tiny models that the test suites share. Every dim is divisible by 4.

Each function returns a module with real weights on the CPU and example inputs with a batch of 2
sequences; the hand-written model comes with its loss function too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 128
SEQ = 16
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
FFN = 128

LossFn = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


def token_batch(
    batch: int = 2, seq: int = SEQ, *, seed: int = 0, vocab: int = VOCAB
) -> dict[str, Tensor]:
    """Random ``input_ids`` and ``labels`` [batch, seq]; one label in eight is ignored (-100)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (batch, seq), generator=generator)
    labels = torch.randint(0, vocab, (batch, seq), generator=generator)
    ignored = torch.rand(batch, seq, generator=generator) < 0.125
    return {"input_ids": ids, "labels": labels.masked_fill(ignored, -100)}


def tiny_llama(
    layers: int = 2, *, seed: int = 0, seq: int = SEQ, **overrides: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A Hugging Face Llama with grouped-query attention; ``overrides`` go to its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": seq,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **overrides,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**settings)), token_batch(seq=seq)


def tiny_gpt2(
    layers: int = 2, *, seed: int = 0, seq: int = SEQ, dropout: float = 0.0, **overrides: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A Hugging Face GPT-2: tied embedding, fused QKV as Conv1D, learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "n_embd": HIDDEN,
        "n_inner": FFN,
        "n_layer": layers,
        "n_head": HEADS,
        "n_positions": seq,
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **overrides,
    }
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(**settings)), token_batch(seq=seq)


class SelfAttention(nn.Module):
    """Causal self-attention with one fused projection for query, key and value."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        query, key, value = (
            part.view(batch, seq, self.heads, hidden // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(batch, seq, hidden))
        return out


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = SelfAttention(hidden, heads)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class TinyTransformer(nn.Module):
    """A plain decoder: learned positions, fused QKV split by ``chunk``, untied head.

    Returns logits [b, s, vocab].
    """

    def __init__(
        self,
        layers: int = 2,
        *,
        vocab: int = VOCAB,
        hidden: int = HIDDEN,
        heads: int = HEADS,
        ffn: int = FFN,
        seq: int = SEQ,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(seq, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, ffn) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [b, s, vocab] of ``tokens`` [b, s]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean cross-entropy of ``logits`` [b, s, vocab] and ``targets`` [b, s]; -100 is ignored."""
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def tiny_transformer(
    layers: int = 2, *, seed: int = 0, seq: int = SEQ
) -> tuple[nn.Module, dict[str, Tensor], LossFn]:
    """The hand-written model, with inputs ``tokens`` and ``targets`` and its loss function."""
    torch.manual_seed(seed)
    batch = token_batch(seq=seq)
    inputs = {"tokens": batch["input_ids"], "targets": batch["labels"]}
    return TinyTransformer(layers, seq=seq), inputs, next_token_loss
