"""Measuring the machine that runs: a hardware file whose numbers fit the cost model to it."""

from autopar.calibration.document import check_output
from autopar.calibration.procedure import Request, calibrate, default_hardware

__all__ = ["Request", "calibrate", "check_output", "default_hardware"]
