"""Running a program on ranks: communication, parameter storage, and the interpreter of schedules."""

from autopar.runtime.communicator import Communicator
from autopar.runtime.engine import Engine, StepResult, schedule_of
from autopar.runtime.launch import connect, is_launched, rehearse
from autopar.runtime.optimizers import OptimizerFactory

__all__ = [
    "Communicator",
    "Engine",
    "OptimizerFactory",
    "StepResult",
    "connect",
    "is_launched",
    "rehearse",
    "schedule_of",
]
