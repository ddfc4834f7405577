"""Factor rules of ops: one file per family, proved by running them shard by shard.

Importing this package registers all families.
"""

from autopar.ir.rules import (
    attention,
    creation,
    embedding,
    experts,
    indexing,
    linear,
    loss,
    norm,
    pointwise,
    reduction,
    shape,
)

__all__ = [
    "attention",
    "creation",
    "embedding",
    "experts",
    "indexing",
    "linear",
    "loss",
    "norm",
    "pointwise",
    "reduction",
    "shape",
]
