"""Findings of papers, reproduced with autopar's cost model, as pages of the documentation:

    python -m benchmarks.papers              # all of docs/papers
    python -m benchmarks.papers zero         # one page

No GPU is needed: every number is an estimate of a pinned layout, or a plan.
"""
