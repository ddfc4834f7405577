"""Hardware files, and clusters of them."""

from autopar.solver.hardware.cluster import Cluster
from autopar.solver.hardware.read import known_hardware, read_hardware
from autopar.solver.hardware.spec import Hardware

__all__ = ["Cluster", "Hardware", "known_hardware", "read_hardware"]
