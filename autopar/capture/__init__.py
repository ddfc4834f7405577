"""Capture turns a model into a graph on the meta device, with its repeated blocks folded."""

from autopar.capture.host import HOST
from autopar.capture.reference import run_kind, run_reference
from autopar.capture.sources import Inputs, LossFn, ModelSource, open_model
from autopar.capture.steps import COMPUTE_DTYPES, capture

__all__ = [
    "COMPUTE_DTYPES",
    "HOST",
    "Inputs",
    "LossFn",
    "ModelSource",
    "capture",
    "open_model",
    "run_kind",
    "run_reference",
]
