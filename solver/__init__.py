"""The solver: costs, hardware, problem, ILP, search over meshes, and the simulator."""

from autopar.solver.hardware import Cluster
from autopar.solver.solve import solve

__all__ = ["Cluster", "solve"]
