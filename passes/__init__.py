"""Passes rewrite a typed graph: each one verb, one file, one frozen dataclass."""
