"""Models that make a search oversized: many experts, and many blocks of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.functional import routed_experts

Example = tuple[nn.Module, dict[str, Tensor]]

_VOCABULARY = 32000


def many_experts(seq_len: int = 4096) -> Example:
    """32 layers, each with 1,024 experts of which a token takes 8."""

    def layer() -> nn.Module:
        return Layer(4096, Attention(4096, 32), Experts(4096, 1024, num_experts=1024, top_k=8))

    with torch.device("meta"):
        return Model(4096, [layer], 32), _tokens(seq_len)


def many_blocks(seq_len: int = 4096) -> Example:
    """1,000 layers of 5 kinds in turn."""
    hidden = 2048
    kinds = (
        lambda: Layer(hidden, Attention(hidden, 16), Mlp(hidden, 4 * hidden)),
        lambda: Layer(hidden, Attention(hidden, 16), GatedMlp(hidden, 3 * hidden)),
        lambda: Layer(hidden, Attention(hidden, 32), Mlp(hidden, 2 * hidden)),
        lambda: Layer(hidden, GatedMlp(hidden, hidden), Mlp(hidden, 4 * hidden)),
        lambda: Layer(
            hidden, Attention(hidden, 8), Experts(hidden, hidden, num_experts=8, top_k=2)
        ),
    )
    with torch.device("meta"):
        return Model(hidden, kinds, 1000), _tokens(seq_len)


class Model(nn.Module):
    """A causal language model whose layers take their kinds in turn; returns its loss."""

    def __init__(
        self, hidden: int, kinds: Sequence[Callable[[], nn.Module]], num_layers: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, hidden)
        self.layers = nn.ModuleList(kinds[index % len(kinds)]() for index in range(num_layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Layer(nn.Module):
    """Two residual parts, each behind a norm."""

    def __init__(self, hidden: int, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.first, self.second = first, second

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.first(self.first_norm(hidden))
        return hidden + self.second(self.second_norm(hidden))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(hidden, hidden, bias=False) for _ in range(4)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            project(hidden).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two products with a GELU between them."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(hidden)))


class GatedMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(hidden)) * self.up(hidden))


class Experts(nn.Module):
    """Routed SwiGLU experts."""

    def __init__(self, hidden: int, inner: int, *, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.up = nn.Parameter(torch.empty(num_experts, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, inner))

    def forward(self, hidden: Tensor) -> Tensor:
        chances = self.router(hidden).softmax(-1)
        weights, chosen = chances.topk(self.top_k, dim=-1)
        return routed_experts(
            hidden, chosen, weights, self.up, self.down, activation="silu", gated=True
        )


def _tokens(seq_len: int) -> dict[str, Tensor]:
    tokens = torch.zeros(2, seq_len, dtype=torch.int64)
    return {"tokens": tokens, "labels": tokens.clone()}
