"""Several sweeps over all measurements, as one.

A machine that others share changes its pace from second to second. What is measured in one go has
the pace of that moment; sweeps that follow each other see all paces in every measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from autopar.calibration.samples import Timing

Measurements = TypeVar("Measurements")


def merged(sweeps: Sequence[Measurements]) -> Measurements:
    """The first sweep, with the timings of all: of each the fastest and the median of medians.

    Args:
        sweeps: Data classes, tuples, lists and mappings of the same form, which differ in timings.
    """
    return cast("Measurements", _merged(sweeps))


def _merged(found: Sequence[Any]) -> Any:
    first = found[0]
    if all(other == first for other in found[1:]):
        return first
    if isinstance(first, Timing):
        return replace(
            first,
            best_s=min(timing.best_s for timing in found),
            median_s=statistics.median(timing.median_s for timing in found),
        )
    if is_dataclass(first) and not isinstance(first, type):
        parts = {
            own.name: _merged([getattr(one, own.name) for one in found]) for own in fields(first)
        }
        return replace(first, **parts)
    if isinstance(first, (tuple, list)):
        return type(first)(_merged(own) for own in zip(*found, strict=True))
    if isinstance(first, Mapping):
        return {name: _merged([one[name] for one in found]) for name in first}
    return first
