"""Passes rewrite a captured graph under a layout into the program that each rank runs."""

from autopar.passes.evaluation import lower_evaluation
from autopar.passes.pipeline import lower, lower_plan
from autopar.passes.plan_moves import plan_moves

__all__ = ["lower", "lower_evaluation", "lower_plan", "plan_moves"]
