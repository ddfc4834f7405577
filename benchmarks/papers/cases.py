"""The models that are swept: their shapes, GPUs and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.estimation import ModelShape
from autopar.solver import Cluster
from benchmarks.papers.study import Study, shape_facts
from benchmarks.papers.sweep import Space, Sweep, sweep

TOKENS = 2**22
"""Of a step at all lengths: 2,048 sequences of 2k, 512 of 8k."""

LENGTHS = (2048, 4096, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model of any length, and the GPUs that train it."""

    name: str
    shape: ModelShape
    gpus: int

    def study(self, seq: int, cluster: Cluster | None = None) -> Study:
        """At one length; on A100s unless told otherwise."""
        return Study(
            shape_facts(replace(self.shape, seq=seq)),
            cluster or Cluster("a100-80gb", nodes=self.gpus // 8),
            global_batch_size=TOKENS // seq,
        )

    def sweep(self, seq: int, *spaces: Space, cluster: Cluster | None = None) -> Sweep:
        """Layouts of ``spaces`` at one length."""
        return sweep(self.name, seq, self.study(seq, cluster), self.shape.layers, *spaces)


def _llama(hidden: int, layers: int, heads: int, ffn: int, kv_heads: int = 0) -> ModelShape:
    return ModelShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads or heads,
        ffn=ffn,
        mlp="swiglu",
        vocab=128_000,
        seq=2048,
    )


LLAMAS: Sequence[Case] = (
    Case(name="Llama 13B", shape=_llama(5120, 40, 40, 13824), gpus=64),
    Case(name="Llama 30B", shape=_llama(6656, 60, 52, 17888), gpus=128),
    Case(name="Llama 65B", shape=_llama(8192, 80, 64, 22016), gpus=128),
)
"""Hagemann et al.; the vocabulary is theirs, too."""

GPT_13B = replace(_llama(5120, 40, 40, 4 * 5120), mlp="gelu4h", vocab=51_200)
OTHERS: Sequence[Case] = (
    Case(name="Llama 3 8B", shape=_llama(4096, 32, 32, 14336, kv_heads=8), gpus=64),
    Case(name="Llama 3 70B", shape=_llama(8192, 80, 64, 28672, kv_heads=8), gpus=128),
    Case(name="GPT 13B", shape=GPT_13B, gpus=64),
)
"""Grouped keys and values, and a GPT with gelu, LayerNorm, biases and a tied head."""

GPT_162B = ModelShape(
    hidden=20_480,
    layers=32,
    heads=128,
    kv_heads=128,
    ffn=4 * 20_480,
    mlp="gelu4h",
    vocab=51_200,
    seq=2048,
)
"""Narayanan et al. 2021, section 5.4.1: 162.2 billion parameters on 64 GPUs."""

PUBLISHED_MFU: Mapping[tuple[str, int], float] = {
    ("Llama 13B", 2048): 0.705,
    ("Llama 13B", 8192): 0.627,
    ("Llama 30B", 2048): 0.619,
    ("Llama 30B", 8192): 0.602,
    ("Llama 65B", 2048): 0.596,
}
"""The best runs of Hagemann et al., table 2: 64 GPUs each."""
