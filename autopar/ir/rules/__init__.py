"""Factor rules of ops: one file per family, proved by running them shard by shard.

Importing this package registers all families.
"""

from autopar.ir.rules import (
    attention,
    convolution,
    creation,
    embedding,
    experts,
    indexing,
    linear,
    loss,
    norm,
    pointwise,
    reduction,
    scatter,
    shape,
    spatial,
)

__all__ = [
    "attention",
    "convolution",
    "creation",
    "embedding",
    "experts",
    "indexing",
    "linear",
    "loss",
    "norm",
    "pointwise",
    "reduction",
    "scatter",
    "shape",
    "spatial",
]
