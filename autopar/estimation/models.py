"""The model that a row describes by its sizes, as a Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from autopar.capture.sources import ModelSource, open_settings
from autopar.ir.errors import InputError

Mlp = Literal["gelu4h", "swiglu"]
MLPS: tuple[str, ...] = get_args(Mlp)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer. Rows of one shape share a captured graph.

    Attributes:
        ffn: Features between the linears of the feed-forward network.
        mlp: ``swiglu`` is a Llama: gated, RMSNorm, rotary positions, no biases, untied head.
            ``gelu4h`` is a GPT-2: gelu, LayerNorm, learned positions, biases, tied head.
        seq: Tokens of a sequence, which are all positions that the model has.

    Raises:
        InputError: No such model can be built; names the size.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    mlp: Mlp
    vocab: int
    seq: int

    def __post_init__(self) -> None:
        for name, of in (("heads", "hidden"), ("kv_heads", "heads")):
            divisor, size = getattr(self, name), getattr(self, of)
            if size % divisor:
                raise InputError(f"{name}={divisor} does not divide {of}={size}")
        if self.mlp == "swiglu" and self.hidden // self.heads % 2:
            raise InputError(
                f"heads={self.heads} of hidden={self.hidden} have {self.hidden // self.heads} "
                "features each: rotary positions need an even number"
            )
        if self.mlp == "gelu4h" and self.kv_heads != self.heads:
            raise InputError(
                f"kv_heads={self.kv_heads} is not heads={self.heads}: a GPT-2 has no grouped heads"
            )

    @property
    def name(self) -> str:
        """What plans and messages call the model."""
        kind = "llama" if self.mlp == "swiglu" else "gpt2"
        return f"{kind}-{self.layers}x{self.hidden}-{self.seq}"


def settings_of(shape: ModelShape) -> dict[str, Any]:
    """The ``config.json`` of the model, as a dict."""
    common: dict[str, Any] = {"vocab_size": shape.vocab, "bos_token_id": 0, "eos_token_id": 0}
    if shape.mlp == "swiglu":
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": shape.hidden,
            "intermediate_size": shape.ffn,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "max_position_embeddings": shape.seq,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            **common,
        }
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": shape.hidden,
        "n_inner": shape.ffn,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_positions": shape.seq,
        "activation_function": "gelu",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": True,
        **common,
    }


def open_shape(shape: ModelShape) -> ModelSource:
    """The model, as the same config in a file would open it."""
    return open_settings(settings_of(shape), name=shape.name)
