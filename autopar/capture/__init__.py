"""Capture turns a model into a graph on the meta device, with its repeated blocks folded."""
