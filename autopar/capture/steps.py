"""``capture``: from a model to its graph, step by step."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import nn

from autopar.capture.clean import clean, freeze_unreached
from autopar.capture.constants import fold_constants
from autopar.capture.export import export_graph
from autopar.capture.fingerprint import fingerprint
from autopar.capture.fold import Folded, fold
from autopar.capture.loss import normalize_loss
from autopar.capture.masks import simplify_masks
from autopar.capture.rows import pick_by_sequence
from autopar.capture.slices import join_slices
from autopar.capture.sources import Inputs, LossFn, meta_inputs, named_inputs
from autopar.capture.unmerge import unmerge
from autopar.ir.errors import InputError
from autopar.ir.graph import ModelGraph, Role, TensorInfo

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_ALONE = threading.Lock()
"""Tracing is a state of the process: one thread at a time."""


def capture(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    loss_fn: LossFn | None = None,
    compute_dtype: torch.dtype = torch.float32,
    training: bool = True,
    name: str | None = None,
) -> ModelGraph:
    """The forward pass of ``model`` with its loss, for any batch size, cut into blocks with
    repeated ones folded.

    The model is not changed and its weights are not read. The loss is what the model returns (a
    scalar, or an output with a ``loss``) or what ``loss_fn(output, batch)`` makes of it, where
    ``batch`` has all inputs by name.

    Args:
        model: Any module, on any device.
        example_inputs: As ``forward`` takes them, batch first. With ``loss_fn``, inputs that
            ``forward`` does not take go to the loss alone.
        loss_fn: Gives a scalar.
        compute_dtype: What floats are computed in, inputs included: float32, bfloat16, float16 or
            float64.
        training: Whether in train mode or in eval mode, whatever mode the model is in.
        name: Of the model; the class by default.

    Raises:
        InputError: The inputs do not fit the model.
        CaptureError: The model cannot be captured; the error names its source line.
    """
    if compute_dtype not in COMPUTE_DTYPES:
        raise InputError(f"compute_dtype {compute_dtype} is none of {COMPUTE_DTYPES}")
    inputs = {
        name: value.to(compute_dtype) if value.is_floating_point() else value
        for name, value in meta_inputs(named_inputs(model, example_inputs)).items()
    }
    with _ALONE:
        flat = export_graph(model, inputs, loss_fn, compute_dtype, training=training)
    clean(flat)
    unmerge(flat)
    pick_by_sequence(flat)
    simplify_masks(flat)  # before folding: a mask is large, and most are never needed
    fold_constants(flat)
    join_slices(flat)
    freeze_unreached(flat)
    loss_kind = normalize_loss(flat)
    folded = fold(flat)
    read = _read_inputs(flat.inputs, folded)
    return ModelGraph(
        name=name or type(model).__name__,
        blocks=folded.blocks,
        kinds=folded.kinds,
        parameters=flat.parameters,
        inputs=read,
        constants=flat.constants,
        loss=folded.results[0],
        weight=folded.results[1] if len(folded.results) > 1 else None,
        loss_kind=loss_kind,
        compute_dtype=compute_dtype,
        fingerprint=fingerprint(folded, read, flat.constants, loss_kind, compute_dtype),
    )


def _read_inputs(inputs: Mapping[str, TensorInfo], folded: Folded) -> dict[str, TensorInfo]:
    """Those that some block reads; others change nothing, and no batch has to have them."""
    read = {
        value.name
        for block in folded.blocks
        for value in block.bindings
        if value.role is Role.INPUT
    }
    return {name: facts for name, facts in inputs.items() if name in read}
