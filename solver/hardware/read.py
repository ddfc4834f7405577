"""Reading hardware files, strictly: every field known and present, every number with its source.

A cluster file (``clusters.py``) has such numbers, too.
"""

from __future__ import annotations

import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from autopar.ir.errors import ClusterError
from autopar.solver.hardware.spec import Hardware

_FOLDER = Path(__file__).parent
_PRECISIONS = ("bf16", "fp32", "float64")


def known_hardware() -> tuple[str, ...]:
    """Names of the hardware files that come with autopar."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def read_hardware(name_or_file: str | Path) -> tuple[Hardware, bytes]:
    """The hardware that a known name or a path to a TOML file describes, and the file's bytes.

    Raises:
        ClusterError: No such file, not TOML, an unknown or missing field, a value out of range.
    """
    path = find_file(name_or_file)
    document, text = read_toml(path)
    return hardware_of(document, path), text


def hardware_of(document: Mapping[str, object], path: Path) -> Hardware:
    """The hardware that the document in a file describes; errors are those of ``read_hardware``."""
    sources: dict[str, str] = {}
    document = {"name": path.stem, "sources": sources, **document}
    hardware = Reader(str(path), sources).record(Hardware, document, "")
    assert isinstance(hardware, Hardware)
    if hardware.precision not in _PRECISIONS:
        raise ClusterError(
            f"precision is {hardware.precision!r}, not one of {', '.join(_PRECISIONS)}",
            where=str(path),
        )
    return hardware


def read_toml(path: Path) -> tuple[dict[str, object], bytes]:
    """A TOML file as a document, and its bytes."""
    try:
        text = path.read_bytes()
        return tomllib.loads(text.decode()), text
    except OSError as error:
        reason = error.strerror or str(error)
        raise ClusterError(f"cannot read the hardware file: {reason}", where=str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClusterError(f"not a TOML file: {error}", where=str(path)) from None


def find_file(name_or_file: str | Path) -> Path:
    """The file of a known name, or at a path.

    Raises:
        ClusterError: Neither a known name nor a path to a .toml file.
    """
    built_in = _FOLDER / f"{name_or_file}.toml"
    if str(name_or_file) in known_hardware():
        return built_in
    path = Path(name_or_file)
    if path.suffix != ".toml":
        raise ClusterError(
            f"no hardware is called {str(name_or_file)!r}",
            hint=f"{', '.join(known_hardware())}, or a path to a .toml file",
        )
    return path


class Reader:
    """Turns tables into the dataclasses of ``spec``; collects sources by dotted path."""

    def __init__(self, where: str, sources: dict[str, str]) -> None:
        self.where = where
        self.sources = sources

    def record(self, kind: type, table: object, path: str) -> Any:
        """``table`` as the dataclass ``kind``."""
        if not isinstance(table, dict):
            raise ClusterError(f"{path} must be a table", where=self.where)
        types = typing.get_type_hints(kind)
        names = [field.name for field in fields(kind)]
        unknown = [name for name in table if name not in names]
        missing = [name for name in names if name not in table]
        if unknown or missing:
            what = f"unknown field {unknown[0]}" if unknown else f"missing field {missing[0]}"
            raise ClusterError(f"{what} in {path or 'the hardware file'}", where=self.where)
        return kind(
            **{name: self.value(types[name], table[name], _join(path, name)) for name in names}
        )

    def value(self, kind: Any, found: object, path: str) -> Any:
        """One field: a table, a text, a plain int, or a number with its source."""
        if is_dataclass(kind):
            assert isinstance(kind, type)
            return self.record(kind, found, path)
        if path in ("name", "device", "backend", "precision"):
            if not isinstance(found, str) or not found:
                raise ClusterError(f"{path} must be a text", where=self.where)
            return found
        if path == "sources":
            return found
        if path == "gpus_per_node":
            return self.number(int, found, path)
        if not isinstance(found, Mapping) or set(found) != {"value", "source"}:
            raise ClusterError(
                f"{path} must be a number with its source",
                where=self.where,
                hint=f'{path} = {{ value = 1.0, source = "datasheet" }}',
            )
        if not isinstance(found["source"], str) or not found["source"]:
            raise ClusterError(f"the source of {path} must be a text", where=self.where)
        self.sources[path] = found["source"]
        return self.number(kind, found["value"], path)

    def number(self, kind: type, found: object, path: str) -> float | int:
        """A number that is not negative (and positive where nothing else makes sense)."""
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ClusterError(f"{path} must be a number, not {found!r}", where=self.where)
        if not math.isfinite(found):
            raise ClusterError(f"{path} must be a finite number, not {found}", where=self.where)
        if found < 0 or (found == 0 and path not in _MAY_BE_ZERO):
            raise ClusterError(f"{path} must be positive, not {found}", where=self.where)
        if kind is int and found != int(found):
            raise ClusterError(f"{path} must be a whole number, not {found}", where=self.where)
        share = path.startswith("efficiency.") or path in (
            "overlap.slowdown",
            "node_link.in_step",
            "network.efficiency",
            "host_link.efficiency",
            "between.efficiency",
        )
        share = share and path != "efficiency.tile_ramp"
        if share and found > 1:
            raise ClusterError(f"{path} is a share: at most 1, not {found}", where=self.where)
        if path == "node_link.lost_per_rank" and found >= 2:
            raise ClusterError(
                f"{path} leaves two ranks no bandwidth: less than 2, not {found}", where=self.where
            )
        return kind(found)


_MAY_BE_ZERO = (
    "memory.context_bytes",
    "memory.fragmentation",
    "memory.overlap_fragmentation",
    "memory.reserve",
    "node_link.lost_per_rank",
    "node_link.latency_s",
    "node_link.latency_per_rank_s",
    "network.latency_s",
    "between.latency_s",
    "overlap.slowdown",
    "chip.launch_s",
    "chip.kernel_s",
    "efficiency.tile_ramp",
    "runtime.touch_s",
    "runtime.update_s",
    "runtime.update_element_s",
    "runtime.step_s",
)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
