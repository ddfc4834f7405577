"""What the search proves and finds, held against all plans of small instances.

Instances are drawn: 2 to 4 blocks of up to 4 ops, up to 16 GPUs in odd counts, too, tight and loose
memory, slow and fast links. `make stress PYTEST_ARGS=tests/solver/test_whole_plans.py` goes deep.
"""

import dataclasses
import math

from hypothesis import given, reject, settings

from autopar.solver import Cluster
from autopar.solver.instance import Instance, make_instance
from tests.solver.drawn import Drawn, changed, instances
from tests.solver.graphs import block_model
from tests.solver.small import TRAINING
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
    whole = WholePlans(refiner.pricer, instance.pin, most_layouts=most_layouts)
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


def test_no_plan_is_faster_where_tensor_ranks_gather_again() -> None:
    """Memory for almost all that is kept where nothing is done again."""
    model = block_model([("relu", 0), ("linear", 0), ("linear", 0)], num_blocks=2)
    pin: dict[str, int | str] = {"tp": 2, "pp": 2, "micro_batch_size": 8, "loss_chunks": 1}
    pin |= {"virtual_stages": 1, "schedule": "1f1b"}
    cluster = changed(
        Cluster("cpu-local", gpus_per_node=4).scaled(node=1000.0), latency=0.0, launch=0.0
    )

    def on(own: Cluster) -> Instance:
        return make_instance(model, own, global_batch_size=512, training=TRAINING, pin=pin)

    plenty = on(cluster)
    best = plenty.search.run(plenty.candidates).best
    assert best is not None
    most = max(best.stager.peak_bytes(best.cuts))
    instance = on(with_memory(cluster, int(0.97 * most)))
    check(instance, most_layouts=400)
    found = instance.search.run(instance.candidates).best
    assert found is not None
    assert found.candidate.gathered_again


def with_memory(cluster: Cluster, usable_bytes: int) -> Cluster:
    """A cluster whose GPUs have so much."""
    chip = dataclasses.replace(cluster.hardware.chip, usable_bytes=usable_bytes)
    return cluster.with_hardware(dataclasses.replace(cluster.hardware, chip=chip))
