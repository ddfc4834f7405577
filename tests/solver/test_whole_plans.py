"""What the search proves and finds, held against all plans of small instances.

Instances are drawn: 2 to 4 blocks of up to 4 ops, up to 16 GPUs in odd counts, too, tight and loose
memory, slow and fast links. `make stress PYTEST_ARGS=tests/solver/test_whole_plans.py` goes deep.
"""

import math

from hypothesis import given, reject, settings

from autopar.solver.instance import Instance
from tests.solver.drawn import Drawn, instances
from tests.solver.whole_plans import TooLarge, WholePlans

_SHARE = 1 + 1e-9


@settings(max_examples=settings().max_examples // 2)
@given(drawn=instances(max_candidates=40))
def test_no_plan_is_faster_than_what_is_proved(drawn: Drawn) -> None:
    try:
        check(drawn.instance, most_layouts=150)
    except TooLarge:
        reject()


@settings(max_examples=settings().max_examples // 2)
@given(drawn=instances(max_candidates=30, max_ops=3, mixed=True))
def test_no_plan_is_faster_than_what_is_proved_on_several_groups_of_nodes(drawn: Drawn) -> None:
    try:
        check(drawn.instance, most_layouts=100)
    except TooLarge:
        reject()


def check(instance: Instance, *, most_layouts: int | None = None) -> None:
    """Assert of an instance that no plan of a candidate is faster than a bound of it, that none is
    faster than what the search proves, and that what it finds is a plan that fits.

    Raises:
        TooLarge: A setting has more layouts.
    """
    refiner = instance.search.refiner
    whole = WholePlans(refiner.pricer, most_layouts=most_layouts)
    least = {candidate: whole.least_s(candidate) for candidate in instance.candidates}
    for candidate, step_s in least.items():
        for bound in (refiner.rough, refiner.scalar, refiner.stages, refiner.layouts):
            assert bound(candidate) <= step_s * _SHARE, f"{bound.__name__} of {candidate}"
    result, fastest = instance.search.run(instance.candidates), min(least.values())
    assert result.bound_s <= fastest * _SHARE
    if result.best is None:
        assert math.isinf(fastest) or result.unsettled
        return
    assert fastest <= result.best.step_s * _SHARE
    for own in result.best.beside or (result.best,):
        assert own.stager.fits(own.cuts)
