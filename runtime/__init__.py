"""Running a program on ranks: communication, parameter storage, the interpreter of schedules."""

from autopar.runtime.communicator import Communicator
from autopar.runtime.engine import Engine, schedule_of
from autopar.runtime.launch import connect, is_launched, rehearse
from autopar.runtime.optimizers import OptimizerFactory
from autopar.runtime.results import EvalResult, StepResult
from autopar.runtime.share import num_launched, share_text

__all__ = [
    "Communicator",
    "Engine",
    "EvalResult",
    "OptimizerFactory",
    "StepResult",
    "connect",
    "is_launched",
    "num_launched",
    "rehearse",
    "schedule_of",
    "share_text",
]
