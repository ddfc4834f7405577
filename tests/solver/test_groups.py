"""Cluster files: groups of nodes of one kind each, and what links them."""

import dataclasses
from pathlib import Path

import pytest

from autopar.ir.errors import ClusterError
from autopar.solver.hardware import Cluster

TEXT = """
[[group]]
name = "old"
hardware = "a100-80gb"
nodes = 4

[[group]]
hardware = "h100-80gb"
nodes = 2
gpus_per_node = 4

[group.network]
node_bytes_per_s = { value = 100e9, source = "datasheet" }
efficiency = { value = 0.5, source = "estimate" }
latency_s = { value = 0, source = "estimate" }

[between]
node_bytes_per_s = { value = 50e9, source = "datasheet" }
efficiency = { value = 0.6, source = "estimate" }
latency_s = { value = 1e-4, source = "estimate" }
"""


def read(folder: Path, text: str = TEXT) -> Cluster:
    path = folder / "mixed.toml"
    path.write_text(text)
    return Cluster(path)


def test_a_cluster_file_has_groups_in_its_order(tmp_path):
    cluster = read(tmp_path)
    old, new = cluster.groups
    assert (old.name, old.num_gpus, new.name, new.num_gpus) == ("old", 32, "h100-80gb", 8)
    assert (cluster.num_gpus, cluster.nodes, cluster.gpus_per_node) == (40, 6, 4)
    assert (cluster.device, cluster.backend) == ("cuda", "nccl")
    assert new.hardware.network.bytes_per_s == 50e9
    assert old.hardware == Cluster("a100-80gb").hardware
    assert cluster.between is not None
    assert cluster.between.bytes_per_s == pytest.approx(30e9)
    assert str(cluster.ref()) == "4 × 8 × old + 2 × 4 × h100-80gb"
    assert cluster.ref().num_gpus == 40


def test_hardware_of_a_group_may_be_a_file_beside_it(tmp_path):
    known = Path(__file__).parents[2] / "solver" / "hardware" / "h100-80gb.toml"
    (tmp_path / "mine.toml").write_text(known.read_text())
    cluster = read(tmp_path, TEXT.replace('"h100-80gb"', '"mine.toml"'))
    assert cluster.groups[1].name == "mine"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[between]", "[betwen]", "unknown field betwen"),
        (TEXT[TEXT.index("[between]") :], "", "what links its groups"),
        ("efficiency = { value = 0.6", "efficiency = { value = 1.6", "at most 1"),
        ("node_bytes_per_s = { value = 50e9", "node_bytes_per_s = { value = 0", "positive"),
        ('latency_s = { value = 1e-4, source = "estimate" }', "", "missing field latency_s"),
        ('latency_s = { value = 1e-4, source = "estimate" }', "latency_s = 1e-4", "source"),
        ("nodes = 4", "nodes = 0", "at least 1"),
        ("nodes = 4", "nodes = 1.5", "at least 1"),
        ("nodes = 4", "", "missing field nodes"),
        ("nodes = 4", "nodes = 4\nracks = 1", "unknown field racks"),
        ("gpus_per_node = 4", "gpus_per_node = -4", "at least 1"),
        ('hardware = "a100-80gb"', 'hardware = "b200"', "b200"),
        ('hardware = "a100-80gb"', "hardware = 3", "hardware must be a text"),
        ('hardware = "a100-80gb"', 'hardware = "cpu-local"', "the same device"),
        ('hardware = "h100-80gb"', 'hardware = "no.toml"', "cannot read"),
        ('name = "old"', 'name = "h100-80gb"', "two groups are called h100-80gb"),
        ('name = "old"', 'name = ""', "name must be a text"),
        ('[[group]]\nname = "old"\nhardware = "a100-80gb"\nnodes = 4\n', "", "at least two groups"),
    ],
)
def test_a_wrong_cluster_file_is_refused(tmp_path, old, new, said):
    assert old in TEXT
    with pytest.raises(ClusterError, match=said):
        read(tmp_path, TEXT.replace(old, new, 1))


def test_counts_are_those_of_the_file(tmp_path):
    path = tmp_path / "mixed.toml"
    path.write_text(TEXT)
    for counts in ({"nodes": 6}, {"gpus_per_node": 8}):
        with pytest.raises(ClusterError, match="leave nodes and gpus_per_node out"):
            Cluster(path, **counts)
    cluster = Cluster(path)
    assert cluster.with_gpus(40) is cluster
    for change in (lambda: cluster.with_nodes(3), lambda: cluster.with_gpus(32)):
        with pytest.raises(ClusterError, match="nobody says of which group"):
            change()


def test_changes_apply_to_every_group(tmp_path):
    cluster = read(tmp_path)
    assert cluster.between is not None
    more = cluster.with_more_memory(10)
    assert [group.usable_bytes for group in more.groups] == [
        group.usable_bytes + 10 for group in cluster.groups
    ]
    assert {group.usable_bytes for group in cluster.with_memory(7).groups} == {7}
    faster = cluster.scaled(compute=3, network=2)
    assert faster.between == dataclasses.replace(cluster.between, node_bytes_per_s=100e9)
    for before, after in zip(cluster.groups, faster.groups, strict=True):
        old, new = before.hardware, after.hardware
        assert new.chip.peak_flops.bf16 == 3 * old.chip.peak_flops.bf16
        assert new.network.node_bytes_per_s == 2 * old.network.node_bytes_per_s
        assert after.name == before.name
    assert [group.nodes for group in cluster.repeated(3).groups] == [12, 6]
    alike = cluster.with_network(80)
    assert {group.hardware.network.node_bytes_per_s for group in alike.groups} == {1e10}


def test_a_fingerprint_is_of_all_that_plans_depend_on(tmp_path):
    cluster = read(tmp_path)
    assert cluster.fingerprint == read(tmp_path).fingerprint
    changes = (
        TEXT.replace("nodes = 4", "nodes = 5"),
        TEXT.replace("value = 100e9", "value = 90e9"),
        TEXT.replace("value = 50e9", "value = 40e9"),
        TEXT.replace('"old"', '"older"'),
    )
    others = [read(tmp_path, text) for text in changes]
    others += [cluster.reordered((1, 0)), cluster.scaled(node=2), cluster.with_more_memory(1)]
    assert len({cluster.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)


def test_the_first_ranks_are_on_the_first_group(tmp_path):
    cluster = read(tmp_path)
    peaks = [group.hardware.chip.peak_flops.bf16 for group in cluster.groups]
    assert cluster.peak_flops("bf16", num_gpus=34) == 32 * peaks[0] + 2 * peaks[1]
    turned = cluster.reordered((1, 0))
    assert turned.peak_flops("fp16", num_gpus=34) == 8 * peaks[1] + 26 * peaks[0]
    assert [group.name for group in cluster.ref((1, 0)).groups] == ["h100-80gb", "old"]
    assert cluster.ref((1, 0)).fingerprint == cluster.fingerprint
