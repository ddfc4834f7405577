"""Sweeps over all measurements become one."""

from __future__ import annotations

from dataclasses import replace

from autopar.calibration.samples import Timing
from autopar.calibration.sweeps import merged
from tests.calibration.synthetic import cluster, measured_on


def test_timings_are_the_fastest_and_the_median_of_medians() -> None:
    sweeps = [Timing(best_s=b, median_s=m) for b, m in ((3.0, 4.0), (1.0, 9.0), (2.0, 5.0))]
    assert merged(sweeps) == Timing(best_s=1.0, median_s=5.0)


def test_every_timing_of_a_measurement_is_merged_and_nothing_else() -> None:
    one = measured_on(cluster("a100-80gb"))
    assert one.overlap is not None
    slow = Timing(best_s=50.0, median_s=70.0)
    links = tuple(replace(link, timing=slow) for link in one.links)
    other = replace(one, kernel=slow, links=links, overlap=replace(one.overlap, both=slow))
    found = merged([one, other, other])
    assert found.kernel.median_s == 70.0
    assert found.kernel.best_s == min(50.0, one.kernel.best_s)
    assert {link.timing.median_s for link in found.links} == {70.0}
    assert found.overlap is not None
    assert found.overlap.both.median_s == 70.0
    assert found.overlap.compute == one.overlap.compute
    assert found.products == one.products
    assert merged([one]) == one
