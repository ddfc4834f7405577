"""Cluster files on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar import read_plan
from tests.cli.helpers import BATCH, SEQ, assert_refused, run

CLUSTER = """
[[group]]
name = "old"
hardware = "cpu-local"
nodes = 2
gpus_per_node = 1

[[group]]
name = "new"
hardware = "cpu-local"
nodes = 1
gpus_per_node = 2

[between]
node_bytes_per_s = { value = 1e9, source = "estimate: loopback" }
efficiency = { value = 0.8, source = "estimate" }
latency_s = { value = 5e-5, source = "estimate" }
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.toml"
    path.write_text(CLUSTER)
    return path


def test_a_cluster_file_is_planned_and_says_how_to_start_its_ranks(
    capfd: pytest.CaptureFixture[str], config: Path, cluster: Path, tmp_path: Path
) -> None:
    sizes = ("--cluster", cluster, "--global-batch-size", BATCH, "--seq-len", SEQ)
    path = tmp_path / "plan.json"
    done = run(capfd, "plan", config, *sizes, "--pp", 2, "-o", path)
    assert (done.status, done.err) == (0, "")
    plan = read_plan(path)
    assert {group.name for group in plan.cluster.groups} == {"old", "new"}
    assert [rank.nodes for rank in plan.prediction.ranks] == [
        group.name for group in plan.cluster.groups
    ]
    assert "4 of 4 GPUs (" in done.out
    again = run(capfd, "plan", config, *sizes, "--warm-start", path, "--time-limit", 0)
    assert again.status == 0
    refused = run(capfd, "run", path, "--steps", 1)
    first, second = plan.cluster.groups
    nodes = "0 to 1" if first.nodes == 2 else "0"
    assert_refused(refused, f"{nodes} on {first.name} with --nproc-per-node {first.gpus_per_node}")
    assert f"on {second.name} with" in refused.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--nodes", 2), "how many nodes and GPUs each of its groups has"),
        (("--gpus", "1:4"), "nobody says of which group"),
        (("--tp", 4), "does not divide the 2 GPUs of old"),
    ],
)
def test_what_a_cluster_file_cannot_have_is_refused(
    capfd: pytest.CaptureFixture[str],
    config: Path,
    cluster: Path,
    options: tuple[object, ...],
    said: str,
) -> None:
    assert_refused(run(capfd, "plan", config, "--cluster", cluster, *options), said)


def test_shares_are_pinned_only_where_nodes_differ(
    capfd: pytest.CaptureFixture[str], config: Path
) -> None:
    done = run(capfd, "plan", config, "--cluster", "cpu-local", "--shares", "equal")
    assert_refused(done, "all nodes are of one kind")
