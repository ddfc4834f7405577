"""What a user is told when a model cannot be traced, in place of what torch prints and raises."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from autopar.ir.errors import CaptureError

_NOISY = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
"""Loggers that tell a failure before it is raised, with a traceback through torch."""

_RECURRENT = r"The tensor attributes? (self\.\S*_flat_weights\[\d+\](, )?)+ w(as|ere) assigned"
"""Recurrent layers list their parameters a second time, and the list follows them when traced."""


@contextmanager
def quiet() -> Iterator[None]:
    """While active, torch logs no failures to trace, unless ``TORCH_LOGS`` asks for logs, and does
    not warn of what is no assignment of the model.
    """
    loggers = [] if os.environ.get("TORCH_LOGS") else [logging.getLogger(name) for name in _NOISY]
    for logger in loggers:
        logger.addFilter(_nothing)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_RECURRENT)
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def data_dependent(where: str | None) -> CaptureError:
    """The error for control flow, shapes or numbers that follow from the values of tensors."""
    return CaptureError(
        "the model's control flow or shapes depend on the values of tensors",
        where=where,
        hint="compute with torch.where or masks; what cannot be is made one op with "
        "torch.library.custom_op, which autopar.register_rule gives a rule",
    )


def explained(error: Exception, name: str) -> CaptureError:
    """The user's error for what was raised while the model ``name`` was traced."""
    text = str(error)
    where = _user_line(error)
    kind = type(error).__name__
    if "data-dependent" in text or "DataDependent" in kind:
        return data_dependent(where)
    if "Constraints violated" in text or "ConstraintViolation" in kind:
        fixed = re.search(r"specialized it to be a constant \((\d+)\)", text)
        return CaptureError(
            f"the model fixes the batch size{f' at {fixed[1]}' if fixed else ''}",
            where=where or name,
            hint="take sizes from the input (x.shape[0]) instead of writing them down",
        )
    missing = re.search(r"(\S+): attempted to run this operator with Meta tensors", text)
    if kind == "UnsupportedOperatorException":
        missing = re.match(r"(\S+)", text)
    if missing:
        return CaptureError(
            f"op {missing[1]} does not say its result's shape without values",
            where=where,
            hint="use another op, or give it a shape function with torch.library.register_fake",
        )
    if ".numpy()" in text or "numpy" in kind.lower():
        return CaptureError(
            "the model computes with numpy, which cannot be traced",
            where=where,
            hint="use torch ops, or compute it in __init__ and keep it as a buffer",
        )
    return CaptureError(
        f"the model cannot be traced: {kind}: {_first_line(text)}",
        where=where,
        hint="does the forward pass run on a batch? try torch.export.export(model, …, "
        "strict=False) on it alone",
    )


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "no message"


def _user_line(error: BaseException) -> str | None:
    """The innermost source line of the model that ``error`` passed through."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not re.search(r"[/\\](torch|autopar)[/\\]|contextlib|<", code.co_filename):
            found = f"{code.co_filename}:{trace.tb_lineno}, in {code.co_name}"
        trace = trace.tb_next
    return found
