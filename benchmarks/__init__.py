"""Benchmarks: each prints hardware, versions, seed, and predicted beside measured."""
