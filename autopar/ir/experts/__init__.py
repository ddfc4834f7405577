"""Routed experts (mixture of experts) as one op, so that capture, rules and costs see what it is.

``torch.ops.autopar.routed_experts`` is the op in graphs; importing this package defines it.
"""

from autopar.ir.experts.kernel import ACTIVATIONS
from autopar.ir.experts.op import routed_experts
from autopar.ir.experts.split import expert_dispatch, expert_slice

__all__ = ["ACTIVATIONS", "expert_dispatch", "expert_slice", "routed_experts"]
