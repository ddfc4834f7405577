"""The model zoo: one tiny model of each family that autopar promises to train.

Sizes differ from one another (hidden 48, ffn 80, vocabulary 104, 4 heads, 2 key-value heads), so
that a swapped dim shows, and are divisible by 4. Dropout is off. Windows and offsets are shorter
than a sequence, so that they matter.

    for model in ZOO.values():
        for attention in model.attentions:
            module, batch = model.build(attention), model.inputs()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

VOCAB = 104
SEQ = 16
HIDDEN = 48
HEADS = 4
KV_HEADS = 2
FFN = 80
LAYERS = 2
IMAGE = 12
PATCH = 4
CLASSES = 8
EXPERTS = 4

Batch: TypeAlias = dict[str, Tensor]
LossFn: TypeAlias = Callable[[Any, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """A family: how to build its module and a batch for it.

    ``attentions`` are those that the family has, the fastest first. ``layers`` is the default
    depth, 4 where two kinds of layers alternate.
    """

    name: str
    make: Callable[[str, int], nn.Module]
    batch: Callable[[int, int, Generator], Batch]
    attentions: tuple[str, ...] = ("sdpa", "eager")
    layers: int = LAYERS
    loss_fn: LossFn | None = None

    def build(
        self, attention: str | None = None, *, seed: int = 0, layers: int | None = None
    ) -> nn.Module:
        """The module on the CPU in float32, with the first of ``attentions`` by default."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.make(attention or self.attentions[0], layers or self.layers)
        return _spread(module, seed)

    def inputs(self, batch: int = 2, seq: int = SEQ, *, seed: int = 0) -> Batch:
        """Random inputs by name, labels included, batch first; about one label in eight is
        ignored.
        """
        return self.batch(batch, seq, Generator().manual_seed(seed))

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The loss of ``module`` run eagerly, differentiable."""
        if self.loss_fn is not None:
            names = module.forward.__code__.co_varnames
            return self.loss_fn(
                module(**{name: batch[name] for name in batch if name in names}), batch
            )
        output = module(**batch)
        loss = output[1] if isinstance(output, tuple) else output.loss
        assert isinstance(loss, Tensor)
        return loss


def _spread(module: nn.Module, seed: int) -> nn.Module:
    """Biases and norms that are not all 0 or 1, and weights that matter: a mistake in what is tiny
    or uniform would not show.
    """
    generator = Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.1 if parameter.dim() < 2 else 0.05)
    return module


# --- batches -------------------------------------------------------------------------------------


def _ids(batch: int, seq: int, generator: Generator) -> Tensor:
    return torch.randint(0, VOCAB, (batch, seq), generator=generator)


def _labels(batch: int, seq: int, generator: Generator) -> Tensor:
    ignored = torch.rand(batch, seq, generator=generator) < 0.125
    return _ids(batch, seq, generator).masked_fill(ignored, -100)


def _language(batch: int, seq: int, generator: Generator) -> Batch:
    return {
        "input_ids": _ids(batch, seq, generator),
        "labels": _labels(batch, seq, generator),
    }


def _translation(batch: int, seq: int, generator: Generator) -> Batch:
    return {
        "input_ids": _ids(batch, seq, generator),
        "labels": _labels(batch, max(4, seq * 3 // 4), generator),
    }


def _images(batch: int, seq: int, generator: Generator) -> Batch:
    return {
        "pixel_values": torch.randn(batch, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.randint(0, CLASSES, (batch,), generator=generator),
    }


def _renamed(batch: int, seq: int, generator: Generator) -> Batch:
    found = _language(batch, seq, generator)
    return {"tokens": found["input_ids"], "targets": found["labels"]}


# --- Hugging Face families -----------------------------------------------------------------------


def _family(
    name: str,
    model: str,
    config: str | None = None,
    *,
    batch: Callable[[int, int, Generator], Batch] = _language,
    attentions: tuple[str, ...] = ("sdpa", "eager"),
    layers: int = LAYERS,
    **settings: Any,
) -> ZooModel:
    """A family of ``transformers``; a setting may be a function of the number of layers."""

    def make(attention: str, count: int) -> nn.Module:
        import transformers

        filled = {
            key: value(count) if callable(value) else value for key, value in settings.items()
        }
        config_class = getattr(transformers, config or f"{model.partition('For')[0]}Config")
        built: Any = getattr(transformers, model)._from_config(
            config_class(**filled), attn_implementation=attention
        )
        if getattr(built, "loss_type", "") is None:  # so for GPT-2; it would warn
            built.loss_type = "ForCausalLM"
        assert isinstance(built, nn.Module)
        return built

    return ZooModel(name=name, make=make, batch=batch, attentions=attentions, layers=layers)


def _count(layers: int) -> int:
    return layers


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": _count,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED: dict[str, Any] = {**_SIZES, "intermediate_size": FFN, "num_key_value_heads": KV_HEADS}
_WIDE_HEADS: dict[str, Any] = {**_GROUPED, "head_dim": 16}
_GPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": _count,
    "n_head": HEADS,
    "n_inner": FFN,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _alternating(layers: int) -> list[str]:
    kinds = ("sliding_attention", "full_attention")
    return [kinds[layer % 2] for layer in range(layers)]


# --- plain PyTorch -------------------------------------------------------------------------------


class _NanoAttention(nn.Module):
    """Fused QKV; eager attention masks with a slice of a buffer, as nanoGPT does."""

    bias: Tensor

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.c_attn = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.c_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.flash = attention == "sdpa"
        if not self.flash:
            self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(HIDDEN, dim=2)
        k = k.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        q = q.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        v = v.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
            scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        y = y.transpose(1, 2).contiguous().view(b, t, c)
        out: Tensor = self.c_proj(y)
        return out


class _NanoBlock(nn.Module):
    def __init__(self, attention: str) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(HIDDEN, bias=False)
        self.attn = _NanoAttention(attention)
        self.ln_2 = nn.LayerNorm(HIDDEN, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, FFN, bias=False), nn.GELU(), nn.Linear(FFN, HIDDEN, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class _NanoGPT(nn.Module):
    """Tied embedding and head; returns logits and loss."""

    def __init__(self, attention: str, layers: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, HIDDEN)
        self.wpe = nn.Embedding(64, HIDDEN)
        self.h = nn.ModuleList(_NanoBlock(attention) for _ in range(layers))
        self.ln_f = nn.LayerNorm(HIDDEN, bias=False)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        position = torch.arange(0, tokens.size(1), dtype=torch.long, device=tokens.device)
        x = self.wte(tokens) + self.wpe(position)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100
        )
        return logits, loss


class _TorchEncoder(nn.Module):
    """``nn.TransformerEncoder`` between an embedding and a head; gives logits [b, s, vocab]."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.position = nn.Parameter(torch.zeros(1, 64, HIDDEN))
        layer = nn.TransformerEncoderLayer(
            HIDDEN, HEADS, FFN, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[:, : tokens.shape[1]]
        logits: Tensor = self.head(self.encoder(x))
        return logits


def _token_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


# --- the zoo -------------------------------------------------------------------------------------

_MODELS = (
    _family("llama", "LlamaForCausalLM", **_GROUPED),
    _family("mistral", "MistralForCausalLM", **_GROUPED, sliding_window=6),
    _family("qwen3", "Qwen3ForCausalLM", **_WIDE_HEADS),
    _family(
        "gemma2",
        "Gemma2ForCausalLM",
        **_WIDE_HEADS,
        attentions=("eager",),
        layers=4,
        sliding_window=6,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    _family(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        **_WIDE_HEADS,
        layers=4,
        sliding_window=6,
        layer_types=_alternating,
    ),
    _family("phi3", "Phi3ForCausalLM", **_GROUPED),
    _family("gpt_neox", "GPTNeoXForCausalLM", **_SIZES, intermediate_size=FFN),
    _family("gptj", "GPTJForCausalLM", **_GPT, rotary_dim=8),
    _family("gpt2", "GPT2LMHeadModel", "GPT2Config", **_GPT),
    _family(
        "opt", "OPTForCausalLM", **_SIZES, ffn_dim=FFN, word_embed_proj_dim=HIDDEN, dropout=0.0
    ),
    _family(
        "bloom",
        "BloomForCausalLM",
        attentions=("eager",),
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        n_layer=_count,
        n_head=HEADS,
    ),
    _family(
        "mpt",
        "MptForCausalLM",
        attentions=("eager",),
        vocab_size=VOCAB,
        d_model=HIDDEN,
        n_layers=_count,
        n_heads=HEADS,
        expansion_ratio=2,
        max_seq_len=64,
    ),
    _family("falcon", "FalconForCausalLM", **_SIZES, ffn_hidden_size=FFN),
    _family(
        "bert",
        "BertForMaskedLM",
        **_SIZES,
        intermediate_size=FFN,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
    _family(
        "t5",
        "T5ForConditionalGeneration",
        batch=_translation,
        layers=3,
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=16,
        d_ff=FFN,
        num_layers=_count,
        num_heads=HEADS,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    _family("mixtral", "MixtralForCausalLM", **_GROUPED, num_local_experts=EXPERTS),
    _family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        **_WIDE_HEADS,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        norm_topk_prob=True,
    ),
    _family(
        "vit",
        "ViTForImageClassification",
        batch=_images,
        hidden_size=HIDDEN,
        num_hidden_layers=_count,
        num_attention_heads=HEADS,
        intermediate_size=FFN,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=IMAGE,
        patch_size=PATCH,
        num_labels=CLASSES,
    ),
    ZooModel(name="nanogpt", make=_NanoGPT, batch=_renamed),
    ZooModel(
        name="torch_encoder",
        make=lambda _, layers: _TorchEncoder(layers),
        batch=_renamed,
        attentions=("sdpa",),
        loss_fn=_token_loss,
    ),
)

ZOO: Mapping[str, ZooModel] = {model.name: model for model in _MODELS}
