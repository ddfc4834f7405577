"""Least squares through the cost model."""

from __future__ import annotations

import pytest

from autopar.calibration.fit import Free, fit
from autopar.calibration.hardware import value_at
from autopar.solver.hardware import Cluster
from tests.calibration.synthetic import cluster, link_samples, product_samples

TILES = ("efficiency.tile_256x128", "efficiency.tile_128x128", "efficiency.tile_64x64")
LINK = ("node_link.bytes_per_s", "node_link.latency_s", "node_link.latency_per_rank_s")


def test_shares_of_tiles_are_found_from_products():
    truth = cluster(
        "a100-80gb",
        efficiency__tile_256x128=0.9,
        efficiency__tile_128x128=0.65,
        efficiency__tile_64x64=0.3,
        efficiency__tile_ramp=180.0,
    )
    free = [Free(path=path, low=0.01, high=1.0) for path in TILES]
    free.append(Free(path="efficiency.tile_ramp", low=0.0, high=512.0, scale=100.0))
    found = fit(Cluster("a100-80gb"), product_samples(truth, 2), free)
    for one in free:
        assert value_at(found, one.path) == pytest.approx(value_at(truth.hardware, one.path), 0.01)


def test_latencies_and_bandwidths_are_found_from_collectives():
    truth = cluster(
        "a100-80gb",
        node_link__bytes_per_s=90e9,
        node_link__latency_s=3e-6,
        node_link__latency_per_rank_s=1e-5,
        node_link__lost_per_rank=0.7,
        node_link__in_step=1.0,
    )
    free = [Free(path=path, low=1e-9, high=1e13) for path in LINK]
    free.append(Free(path="node_link.lost_per_rank", low=0.0, high=1.5))
    start = cluster("a100-80gb", node_link__in_step=1.0)
    found = fit(start, link_samples(truth), free)
    for one in free:
        assert value_at(found, one.path) == pytest.approx(value_at(truth.hardware, one.path), 0.01)


def test_what_no_sample_depends_on_stays():
    base = Cluster("a100-80gb")
    samples = product_samples(cluster("a100-80gb", efficiency__tile_256x128=0.5), 2)
    paths = ("efficiency.hbm", "efficiency.flash_forward", "network.latency_s")
    found = fit(base, samples, [Free(path=path, low=1e-9, high=1.0) for path in paths[1:]])
    assert [value_at(found, path) for path in paths] == pytest.approx(
        [value_at(base.hardware, path) for path in paths]
    )


def test_a_number_stays_in_its_range():
    truth = cluster("a100-80gb", efficiency__tile_256x128=0.95, efficiency__tile_128x128=0.9)
    found = fit(
        Cluster("a100-80gb"),
        product_samples(truth, 2),
        [Free(path=path, low=0.01, high=0.75) for path in TILES],
    )
    assert max(value_at(found, path) for path in TILES) == pytest.approx(0.75)


def test_nothing_to_fit_is_the_base():
    base = Cluster("cpu-local")
    assert fit(base, (), [Free(path="efficiency.hbm", low=0.1, high=1.0)]) is base.hardware
