"""``ops``: which ops a model has, by which rules they split, and what is replicated."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from autopar.api.planning import capture_model
from autopar.capture import Inputs, LossFn, open_model
from autopar.ir.errors import InputError
from autopar.ir.plan import PrecisionName
from autopar.solver.coverage import Coverage, coverage_of
from autopar.solver.hardware import Cluster


def ops(
    model: str | Path | nn.Module,
    cluster: Cluster | None = None,
    *,
    example_batch: Inputs | None = None,
    loss_fn: LossFn | None = None,
    seq_len: int | None = None,
    precision: PrecisionName | None = None,
) -> Coverage:
    """The ops of ``model``, each with its rule or the cost of replicating it.

    Args:
        model: As for ``plan``.
        cluster: What costs are told for; default: one node of ``a100-80gb``.
        example_batch: As for ``plan``.
        loss_fn: As for ``plan``.
        seq_len: Tokens per sequence; default: the model's longest.
        precision: Of compute; default: the hardware's.

    Raises:
        InputError: An argument is wrong.
        CaptureError: The model cannot be captured.
    """
    if seq_len is not None and not (isinstance(seq_len, int) and seq_len >= 1):
        raise InputError(f"seq_len is {seq_len}; it must be a whole number, at least 1")
    cluster = cluster or Cluster("a100-80gb")
    source = open_model(model, example_inputs=example_batch, loss_fn=loss_fn)
    graph = capture_model(source, seq_len, precision or cluster.default_precision)
    return coverage_of(graph, cluster)
