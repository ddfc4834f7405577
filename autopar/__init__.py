"""autopar plans and runs parallel training of PyTorch transformers.

``plan`` finds the fastest plan of a model for a cluster, ``estimate`` says what a given layout
takes, ``compile`` makes a plan run on the ranks of the cluster. Importing the package loads neither
torch nor ortools; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from autopar import functional
    from autopar.api import (
        Cluster,
        CompiledModel,
        Coverage,
        Estimate,
        Plan,
        PlanDiff,
        Simulation,
        Sweep,
        compile,
        diff,
        estimate,
        ops,
        plan,
        prove_rule,
        read_plan,
        register_rule,
        simulate,
        sweep,
    )
    from autopar.ir.errors import AutoparError

__all__ = [
    "AutoparError",
    "Cluster",
    "CompiledModel",
    "Coverage",
    "Estimate",
    "Plan",
    "PlanDiff",
    "Simulation",
    "Sweep",
    "__version__",
    "compile",
    "diff",
    "estimate",
    "functional",
    "ops",
    "plan",
    "prove_rule",
    "read_plan",
    "register_rule",
    "simulate",
    "sweep",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "functional":
        return importlib.import_module("autopar.functional")
    module = "autopar.ir.errors" if name == "AutoparError" else "autopar.api"
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
