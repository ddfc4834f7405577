"""Choose kernels: the ops of a local graph become calls of the kernels that the plan names."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.causal import causal_attention
from autopar.ir.eager_attention import eager_attention
from autopar.ir.kernels import KernelSet


def choose_kernels(graph: fx.Graph, kernels: KernelSet) -> None:
    """Attention as ``kernels`` have it, in place.

    ``flash_attention2`` leaves the choice to PyTorch: it takes the best kernel of the device.
    """
    if kernels.attention != "eager":
        return
    for node in graph.nodes:
        if node.target is torch.ops.aten.scaled_dot_product_attention.default:
            node.target = eager_attention
        elif node.target is causal_attention:
            node.update_kwarg("eager", True)
