"""Functions for models that autopar knows how to split."""

from autopar.ir.experts import ACTIVATIONS, routed_experts

__all__ = ["ACTIVATIONS", "routed_experts"]
