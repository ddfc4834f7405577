"""What a user calls: plan a model for a cluster, compile it on the ranks that run."""

from autopar.api.compiled import CompiledModel, compile, compile_plan
from autopar.api.data import synthetic_batches, vocabulary_size
from autopar.api.ops import ops
from autopar.api.planning import cannot_write, check_writable, plan, plan_source
from autopar.ir.plan import Plan, read_plan
from autopar.solver.coverage import Coverage, OpUse
from autopar.solver.hardware import Cluster

__all__ = [
    "Cluster",
    "CompiledModel",
    "Coverage",
    "OpUse",
    "Plan",
    "cannot_write",
    "check_writable",
    "compile",
    "compile_plan",
    "ops",
    "plan",
    "plan_source",
    "read_plan",
    "synthetic_batches",
    "vocabulary_size",
]
