"""Estimates of given layouts: a table of runs, as models and pins."""

from autopar.estimation.models import MLPS, ModelShape, open_shape, settings_of
from autopar.estimation.rows import EstimateRow, RowProblem, RowTable, read_rows
from autopar.estimation.setups import cluster_of, pins_of

__all__ = [
    "MLPS",
    "EstimateRow",
    "ModelShape",
    "RowProblem",
    "RowTable",
    "cluster_of",
    "open_shape",
    "pins_of",
    "read_rows",
    "settings_of",
]
