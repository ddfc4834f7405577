"""Hardware files as text: the base's fields in its order, with other numbers and sources."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.calibration.hardware import value_at
from autopar.ir.errors import InputError
from autopar.solver.hardware import Hardware

_SOURCED = {"value", "source"}


def check_output(path: Path) -> None:
    """Fail before the work where the hardware file cannot be written.

    Raises:
        InputError: Not a ``.toml`` file, or not to be written.
    """
    if path.suffix != ".toml":
        raise InputError(
            "the name of a hardware file ends in .toml", where=str(path), hint=f"-o {path}.toml"
        )
    existed = path.exists()
    try:
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise _cannot_write(path, error) from None


def write_document(path: Path, text: str) -> None:
    """Write a hardware file.

    Raises:
        InputError: It cannot be written.
    """
    try:
        path.write_text(text)
    except OSError as error:
        raise _cannot_write(path, error) from None


def render(
    base: Mapping[str, Any],
    hardware: Hardware,
    sources: Mapping[str, str],
    *,
    base_name: str,
    gpus_per_node: int,
    when: str,
    heading: str,
) -> str:
    """A hardware file.

    Args:
        base: The tables of the file that the calibration started from; all of their fields are
            written, also those that are not known here.
        hardware: The numbers.
        sources: By dotted path, of what was measured; the rest says that it is the base's.
        base_name: What the base is called.
        gpus_per_node: Ranks of a node.
        when: Date and machine, for every source of a measurement.
        heading: First line, a comment.
    """
    top: list[str] = [f"# {heading}"]
    tables: list[str] = []

    def table(name: str, fields: Mapping[str, Any]) -> None:
        tables.append(f"\n[{name}]")
        for field, old in fields.items():
            if set(old) == _SOURCED:
                tables.append(f"{field} = {number(f'{name}.{field}', old)}")
        for field, old in fields.items():
            if set(old) != _SOURCED:
                table(f"{name}.{field}", old)

    def number(path: str, old: Mapping[str, Any]) -> str:
        value, source = old["value"], f"not measured here, from {base_name}: {old['source']}"
        if path in sources:
            value, source = value_at(hardware, path), f"{sources[path]}; {when}"
        return f"{{ value = {_number(value)}, source = {json.dumps(source, ensure_ascii=False)} }}"

    for field, old in base.items():
        if isinstance(old, Mapping):
            table(field, old)
        else:
            value = gpus_per_node if field == "gpus_per_node" else old
            top.append(f"{field} = {json.dumps(value)}")
    return "\n".join((*top, *tables)) + "\n"


def _number(value: float) -> str:
    """Four digits are more than measurements have; whole numbers stay whole."""
    if value == int(value) and value < 2**53:
        return str(int(value))
    return repr(float(f"{value:.4g}"))


def _cannot_write(path: Path, error: OSError) -> InputError:
    return InputError(
        f"cannot write the hardware file: {error.strerror or error}",
        where=str(path),
        hint="give a file in a directory that exists and may be written",
    )
