"""Proving rules by running ops shard by shard, on ranks that are threads."""

from autopar.testing.public import prove_rule

__all__ = ["prove_rule"]
