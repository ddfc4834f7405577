"""Pins that say how a layout is trained: they are settings of the training, not of the solver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast, get_args

from autopar.ir.errors import InputError
from autopar.ir.plan import PrecisionName
from autopar.ir.precision import DTYPES

TRAINING_PINS = ("precision", "comm_precision", "grads_fp32")

Settings = dict[str, PrecisionName]
"""``precision``, ``gradient_dtype`` and ``reduce_dtype``, those that are known."""


def training_pins(
    pin: Mapping[str, int | str], given: Mapping[str, PrecisionName | None], default: PrecisionName
) -> tuple[Settings, dict[str, int | str]]:
    """What the pins of a training say, and the pins that remain for the solver.

    ``precision`` is that of compute; ``comm_precision`` says in which precision gradients are sent
    (``half``: that of compute, if it has 16 bits, or ``fp32``); ``grads_fp32`` says whether they
    are accumulated in fp32 or wider (1), or as compute is (0).

    Args:
        pin: All pins of a user.
        given: Arguments of a user by the names of ``Settings``; None: not given.
        default: Precision of compute where nobody says it.

    Raises:
        InputError: A pin has a value that it cannot have, or contradicts an argument.
    """
    found: Settings = {name: value for name, value in given.items() if value is not None}

    def settle(name: str, value: PrecisionName, pinned: str) -> None:
        if found.setdefault(name, value) != value:
            raise InputError(
                f"{pinned} is pinned, but {name} is {found[name]}",
                hint="give one of them, or both alike",
            )

    if "precision" in pin:
        named = pin["precision"]
        _check("precision", named, get_args(PrecisionName))
        settle("precision", cast("PrecisionName", named), f"precision={named!r}")
    compute = found.get("precision", default)
    if "grads_fp32" in pin:
        wide = pin["grads_fp32"]
        _check("grads_fp32", wide, (0, 1))
        at_least_fp32: PrecisionName = "float64" if compute == "float64" else "fp32"
        settle("gradient_dtype", at_least_fp32 if wide else compute, f"grads_fp32={wide}")
    if "comm_precision" in pin:
        sent = pin["comm_precision"]
        _check("comm_precision", sent, ("half", "fp32"))
        if sent == "half" and compute in DTYPES and DTYPES[compute].itemsize != 2:
            raise InputError(
                f"comm_precision='half' is pinned, but compute is {compute}",
                hint="precision bf16 or fp16, or comm_precision fp32",
            )
        reduced: PrecisionName = compute if sent == "half" else "fp32"
        settle("reduce_dtype", reduced, f"comm_precision={sent!r}")
    return found, {name: value for name, value in pin.items() if name not in TRAINING_PINS}


def _check(name: str, value: object, allowed: tuple[int | str, ...]) -> None:
    if isinstance(value, bool) or value not in allowed:
        options = " or ".join(map(str, allowed))
        raise InputError(f"{name}={value!r} is pinned; it can be {options}")
