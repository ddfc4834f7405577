"""A small grid of pinned layouts: none is faster than the certificate proves, and that is seen."""

import itertools
from dataclasses import replace

import pytest

from autopar.solver.solve import solve_instance
from benchmarks.pinned_grid import pinned_layouts, violation
from tests.solver.small import TWO_NODES, instance


@pytest.mark.parametrize("usable_bytes", [30_000, 2**31])
def test_no_pinned_layout_is_faster_than_the_bound(usable_bytes):
    small = instance(TWO_NODES.with_memory(usable_bytes))
    free = solve_instance(small)
    found = list(itertools.islice(pinned_layouts(small, free, seed=0), 40))
    assert not [pinned for pinned in found if pinned.violation]
    assert sum(pinned.step_s is not None for pinned in found) > 10
    assert len({tuple(pinned.pin.items()) for pinned in found}) > 20


def test_violations_are_seen():
    plan = solve_instance(instance(TWO_NODES))
    certificate, prediction = plan.certificate, plan.prediction
    proved = replace(certificate, bound_s=1.01 * certificate.objective_s)
    assert "below the bound" in violation(plan, replace(plan, certificate=proved))
    full = replace(plan, prediction=replace(prediction, usable_bytes=prediction.fullest.peak_bytes))
    assert violation(full, plan) == ""
    full = replace(plan, prediction=replace(full.prediction, usable_bytes=1))
    assert "fills" in violation(full, plan)
    slower = replace(plan, prediction=replace(prediction, step_s=2 * prediction.step_s))
    assert "simulated again" in violation(slower, plan)
