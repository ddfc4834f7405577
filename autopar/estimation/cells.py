"""Cells of a table: text, and what it may say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.errors import InputError
from autopar.ir.kernels import parse_kernels

Parse = Callable[[str], object]
"""From the text of a cell, without spaces around it.

Raises:
    ValueError: Not allowed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column that is read.

    Attributes:
        allowed: In words, for messages.
        required: Whether each row needs a value; otherwise an empty cell is None.
    """

    parse: Parse
    allowed: str
    required: bool = False


def whole(lowest: int, highest: int | None = None) -> Column:
    """A whole number, also written ``8.0``."""

    def parse(text: str) -> int:
        number = int(text) if text.isdecimal() and len(text) <= 15 else _whole(float(text))
        if number < lowest or (highest is not None and number > highest):
            raise ValueError
        return number

    above = f"from {lowest} on" if highest is None else f"from {lowest} to {highest}"
    return Column(parse=parse, allowed=f"a whole number {above}")


def _whole(number: float) -> int:
    if not math.isfinite(number) or number != int(number) or abs(number) >= 1e15:
        raise ValueError
    return int(number)


def positive() -> Column:
    """A number above 0."""

    def parse(text: str) -> float:
        number = float(text)
        if not math.isfinite(number) or number <= 0:
            raise ValueError
        return number

    return Column(parse=parse, allowed="a number above 0")


def flag() -> Column:
    """0 or 1."""
    known = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
    return Column(parse=lambda text: _look_up(known, text.lower()), allowed="0 or 1")


def choice(names: Mapping[str, str] | Sequence[str]) -> Column:
    """One of ``names``, or what a name stands for."""
    known = dict(names) if isinstance(names, Mapping) else dict(zip(names, names, strict=True))
    return Column(parse=lambda text: _look_up(known, text), allowed=" or ".join(known))


def _look_up(known: Mapping[str, object], text: str) -> object:
    if text not in known:
        raise ValueError
    return known[text]


KERNELS: Mapping[str, str] = {
    "torch": "eager",
    "fused": "fused_softmax",
    "flash_attentionv1.0.8": "flash_attention1",
    "flash_attention2": "flash_attention2",
    "flash_attention2 + RMS kernel": "flash_attention2 + fused norms",
    "fused_softmax": "fused_causal_softmax + fused pointwise",
    "flash_attention": "flash_attention2 + fused norms",
    "flash_triton": "flash_attention1 + fused norms",
}
"""What frameworks call their kernels → ``autopar.ir.kernels``. Megatron's and DeepSpeed's
``fused_softmax`` is causal, and comes with fused bias, gelu, dropout and norms."""


def kernel() -> Column:
    """A kernel by a framework's name, or by ours."""

    def parse(text: str) -> str:
        if text in KERNELS:
            return KERNELS[text]
        try:
            return str(parse_kernels(text))
        except InputError:
            raise ValueError from None

    return Column(parse=parse, allowed=f"{' or '.join(KERNELS)}, or kernels as a plan names them")


def hardware(known: Sequence[str]) -> Column:
    """Hardware that autopar knows; ``a100_80gb`` is ``a100-80gb``."""
    names = {name: name for name in known}

    def parse(text: str) -> object:
        return _look_up(names, text.lower().replace("_", "-"))

    return Column(parse=parse, allowed=" or ".join(known))


def any_text() -> Column:
    """Any text."""
    return Column(parse=str, allowed="any text")
