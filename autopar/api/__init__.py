"""What a user calls: plan a model for a cluster, compile it on the ranks that run."""

from autopar.api.compiled import CompiledModel, compile, compile_plan
from autopar.api.data import synthetic_batches, vocabulary_size
from autopar.api.diff import diff
from autopar.api.estimate import Estimate, estimate
from autopar.api.estimate_rows import RowProgress, estimate_rows
from autopar.api.files import cannot_write, check_writable, write_text
from autopar.api.ops import ops
from autopar.api.planning import plan, plan_source
from autopar.api.simulation import simulate
from autopar.api.sweep import Sweep, SweepPoint, sweep
from autopar.ir.plan import Plan, read_plan
from autopar.ir.plan_diff import PlanDiff
from autopar.ir.rules.custom import register_rule
from autopar.solver.coverage import Coverage, OpUse
from autopar.solver.hardware import Cluster
from autopar.solver.simulate import Simulation
from autopar.testing import prove_rule

__all__ = [
    "Cluster",
    "CompiledModel",
    "Coverage",
    "Estimate",
    "OpUse",
    "Plan",
    "PlanDiff",
    "RowProgress",
    "Simulation",
    "Sweep",
    "SweepPoint",
    "cannot_write",
    "check_writable",
    "compile",
    "compile_plan",
    "diff",
    "estimate",
    "estimate_rows",
    "ops",
    "plan",
    "plan_source",
    "prove_rule",
    "read_plan",
    "register_rule",
    "simulate",
    "sweep",
    "synthetic_batches",
    "vocabulary_size",
    "write_text",
]
