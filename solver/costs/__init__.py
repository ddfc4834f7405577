"""Costs: work, kernels, collectives, saved tensors, memory."""
