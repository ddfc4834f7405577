"""Hardware with other numbers, by the dotted paths that a hardware file has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.solver.hardware import Cluster, Hardware


def value_at(hardware: Hardware, path: str) -> float:
    """The number at ``path``, such as ``chip.launch_s``."""
    found: Any = hardware
    for name in path.split("."):
        found = getattr(found, name)
    return float(found)


def with_values(hardware: Hardware, values: Mapping[str, float]) -> Hardware:
    """``hardware`` with the numbers at the paths of ``values`` replaced."""
    changed: Any = hardware
    for path, value in values.items():
        changed = _with_value(changed, path.split("."), value)
    assert isinstance(changed, Hardware)
    return changed


def on(cluster: Cluster, hardware: Hardware) -> Cluster:
    """A cluster of as many nodes and ranks, of other hardware; only costs may be asked of it."""
    return cluster.with_hardware(hardware)


def _with_value(record: Any, names: list[str], value: float) -> Any:
    old = getattr(record, names[0])
    new = _with_value(old, names[1:], value) if len(names) > 1 else type(old)(value)
    return replace(record, **{names[0]: new})
