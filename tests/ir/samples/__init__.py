"""Random calls of every op that has a rule, for the prover."""

from tests.ir.samples import indexing, layers, pointwise, products, reductions, shapes, spatial
from tests.ir.samples.source import SAMPLES, Source

__all__ = [
    "SAMPLES",
    "Source",
    "indexing",
    "layers",
    "pointwise",
    "products",
    "reductions",
    "shapes",
    "spatial",
]
