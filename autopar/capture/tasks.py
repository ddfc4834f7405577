"""What a Hugging Face config is trained for: the class of its model, and the inputs of that.

The config's ``architectures`` say it (``["BertForMaskedLM"]``); without them, what its model type
is most often trained for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.errors import InputError

Specs = dict[str, Tensor]
"""Tensors on the meta device, for two sequences, by input name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model class of ``transformers`` with what it is trained on.

    ``loss_type`` names the loss for classes that do not say which is theirs. ``label_bound`` is the
    number of labels that there are.
    """

    model_class: Any
    inputs: Callable[[Any, int | None, str], Specs]
    loss_type: str
    label_bound: Callable[[Any], int | None]

    @property
    def attention(self) -> str:
        """The fastest attention that the class has; a config may name another."""
        return "sdpa" if self.model_class._supports_sdpa else "eager"


def find_task(config: Any, names: Iterable[str] = ()) -> Task | None:
    """The task of ``config``: of a class called one of ``names`` or of its ``architectures``, else
    the first that its type has; None if it has none.
    """
    wanted = [*names, *(getattr(config, "architectures", None) or ())]
    tasks = list(_tasks(config))
    named = (task for name in wanted for task in tasks if task.model_class.__name__ == name)
    return next(named, None) or next(iter(tasks), None)


def _tasks(config: Any) -> Iterable[Task]:
    from transformers.models.auto import modeling_auto

    for mapping, inputs, loss_type, label_bound in (
        ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", _tokens, "ForCausalLM", _vocabulary),
        ("MODEL_FOR_MASKED_LM_MAPPING", _tokens, "ForMaskedLM", _vocabulary),
        ("MODEL_FOR_CAUSAL_LM_MAPPING", _tokens, "ForCausalLM", _vocabulary),
        ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", _image, "ForImageClassification", _labels),
        (
            "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
            _sequence,
            "ForSequenceClassification",
            _labels,
        ),
        ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", _tokens, "ForTokenClassification", _labels),
    ):
        classes: Any = getattr(modeling_auto, mapping)
        if type(config) not in classes:
            continue
        found = classes[type(config)]
        for model_class in found if isinstance(found, tuple) else (found,):
            yield Task(
                model_class=model_class,
                inputs=inputs,
                loss_type=loss_type,
                label_bound=label_bound,
            )


def vocabulary_of(config: Any) -> int | None:
    """Number of token ids that the model knows."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def _vocabulary(config: Any) -> int | None:
    return vocabulary_of(config)


def _labels(config: Any) -> int | None:
    count = getattr(config, "num_labels", None)
    return count if isinstance(count, int) else None


# --- inputs --------------------------------------------------------------------------------------


def _tokens(config: Any, seq_len: int | None, where: str) -> Specs:
    """``input_ids`` and ``labels`` [2, seq_len]; the default length is the model's longest."""
    shape = (2, _sequence_length(config, seq_len, where))
    return {name: _integers(*shape) for name in ("input_ids", "labels")}


def _sequence(config: Any, seq_len: int | None, where: str) -> Specs:
    """``input_ids`` [2, seq_len] and one label for each sequence."""
    length = _sequence_length(config, seq_len, where)
    return {"input_ids": _integers(2, length), "labels": _integers(2)}


def _image(config: Any, seq_len: int | None, where: str) -> Specs:
    """``pixel_values`` [2, channels, height, width] and one label for each image."""
    size = getattr(config, "image_size", None)
    if seq_len is not None or size is None:
        raise InputError(
            "the model takes images, whose size is that of the config"
            if size is not None
            else "the config of this image model has no image_size",
            where=where,
            hint="leave the sequence length out" if size is not None else None,
        )
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", 3)
    pixels = torch.empty(2, channels, height, width, device="meta")
    return {"pixel_values": pixels, "labels": _integers(2)}


def _integers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


_LONGEST = ("max_position_embeddings", "max_seq_len", "n_positions")


def _sequence_length(config: Any, seq_len: int | None, where: str) -> int:
    text = config.get_text_config()
    longest = next((v for n in _LONGEST if isinstance(v := getattr(text, n, None), int)), None)
    if seq_len is None:
        seq_len = longest
    if not isinstance(seq_len, int) or seq_len < 1:
        raise InputError(f"no usable sequence length: {seq_len}", where=where, hint="give one")
    if longest is not None and seq_len > longest:
        raise InputError(
            f"sequences of {seq_len} tokens are longer than the model's {longest} positions",
            where=where,
            hint="shorter sequences, or another max_position_embeddings in the config",
        )
    return seq_len
