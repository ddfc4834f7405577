"""Benchmarks that write pages of the documentation: their cores, on tiny models."""
