"""A small transformer in training: what the host adds to kernels, and kernels among others.

Single kernels say too little of a step: autograd keeps and frees tensors, sums gradients of what is
used twice, and takes views, and each kernel finds other tensors in the caches than its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.calibration.samples import Timing
from autopar.capture import capture
from autopar.ir.graph import BATCH, ModelGraph, Size
from autopar.solver.costs.kernels import Kernels
from autopar.solver.costs.work import (
    Work,
    backward_work,
    computing_nodes,
    forward_work,
    global_shapes,
)
from autopar.solver.hardware import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A batch of a small model. ``inner`` is the width between the products of an MLP."""

    sequences: int
    length: int
    hidden: int
    inner: int
    heads: int
    layers: int
    vocabulary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSample:
    """Forward and backward of a small model: the work of each op, and whether it is a backward."""

    kind: str
    works: tuple[tuple[Work, bool], ...]
    timing: Timing

    @property
    def measured_s(self) -> float:
        return self.timing.compute_s

    @property
    def num_kernels(self) -> int:
        """Kernels as the cost model counts them."""
        return sum(work.num_kernels for work, _ in self.works)

    def predicted_s(self, cluster: Cluster) -> float:
        kernels = Kernels(cluster.hardware)
        return sum(kernels.seconds(work, backward=backward) for work, backward in self.works)


def training_of(size: ModelSize, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """Runs forward and backward of the model once."""
    model = _Model(size).to(device=device, dtype=dtype)
    batch = {name: tensor.to(device) for name, tensor in _batch(size).items()}

    def train() -> None:
        model.zero_grad(set_to_none=True)
        _loss(model(batch["tokens"]), batch).backward()

    return train


def sample_of(size: ModelSize, dtype: torch.dtype, timing: Timing, kind: str) -> ModelSample:
    """The work of the model, from its graph, as plans have it."""
    model = _Model(size).to("meta")
    graph = capture(model, _batch(size), loss_fn=_loss, compute_dtype=dtype)
    return ModelSample(kind=kind, works=tuple(_works(graph, size.sequences)), timing=timing)


def _works(graph: ModelGraph, batch: int) -> list[tuple[Work, bool]]:
    found: list[tuple[Work, bool]] = []
    for block in graph.blocks:
        for node in computing_nodes(graph.kind_of(block)):
            shapes = [
                [tuple(_at(size, batch) for size in shape) for shape in side]
                for side in global_shapes(node)
            ]
            found.append((forward_work(node, *shapes), False))
            found.append((backward_work(node, *shapes), True))
    return found


def _at(size: Size, batch: int) -> int:
    return int(size if isinstance(size, int) else size.subs(BATCH, batch))


def _batch(size: ModelSize) -> dict[str, Tensor]:
    tokens = torch.arange(size.sequences * size.length) % size.vocabulary
    tokens = tokens.reshape(size.sequences, size.length)
    return {"tokens": tokens, "targets": tokens.clone()}


def _loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten())


class _Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class _Layer(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention, self.before_mlp = _Norm(size.hidden), _Norm(size.hidden)
        self.query, self.key, self.value, self.out = (
            nn.Linear(size.hidden, size.hidden, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(size.hidden, size.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(size.inner, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before_attention(x)
        query, key, value = (
            part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        query, key = _turned(query), _turned(key)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.before_mlp(x)
        added: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return added


def _turned(heads: Tensor) -> Tensor:
    """As rotary positions do it, by a constant angle."""
    first, second = heads.chunk(2, dim=-1)
    return heads * 0.8 + torch.cat((-second, first), dim=-1) * 0.6


class _Model(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList(_Layer(size) for _ in range(size.layers))
        self.norm = _Norm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
