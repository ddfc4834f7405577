"""Hardware files: complete, sourced, and read strictly."""

from importlib import resources

import pytest

from autopar.ir.errors import ClusterError
from autopar.solver.hardware import Cluster, known_hardware

TEXT = (resources.files("autopar.solver.hardware") / "cpu-local.toml").read_text()


@pytest.mark.parametrize("name", known_hardware())
def test_every_number_has_a_source(name):
    hardware = Cluster(name).hardware
    assert len(hardware.sources) == 47
    assert all(hardware.sources.values())


def test_usable_bytes_of_an_a100_are_79_15_gib():
    assert Cluster("a100-80gb").usable_bytes <= 79.15 * 2**30
    assert Cluster("a100-80gb").usable_bytes > 79.149 * 2**30


def test_a_file_is_hardware_too(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TEXT)
    cluster = Cluster(path, nodes=2, gpus_per_node=3)
    assert (cluster.name, cluster.num_gpus, cluster.backend) == ("mine", 6, "gloo")
    assert cluster.ref().fingerprint != Cluster(path, nodes=3, gpus_per_node=2).fingerprint


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[chip]", "[chipp]", "chipp"),
        ("num_sms = {", "num_smss = {", "num_smss"),
        ("value = 0.7, source = ", "value = 1.7, source = ", "at most 1"),
        ("value = 2_147_483_648", "value = -1", "positive"),
        ("value = 2_147_483_648", 'value = "much"', "number"),
        ("value = 2_147_483_648", "value = nan", "finite"),
        ("value = 2_147_483_648", "value = inf", "finite"),
        ("lost_per_rank = { value = 0.", "lost_per_rank = { value = 2.", "less than 2"),
        ('{ value = 5.0e-6, source = "estimate: dispatch of one PyTorch op" }', "5.0e-6", "source"),
        ('precision = "fp32"', 'precision = "int3"', "int3"),
        ("[memory]", "[memory", "TOML"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, old, new, said):
    path = tmp_path / "wrong.toml"
    assert old in TEXT
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(ClusterError, match=said):
        Cluster(path)


@pytest.mark.parametrize("name", ["b200", "no/such/file.toml"])
def test_unknown_hardware_is_refused(name):
    with pytest.raises(ClusterError):
        Cluster(name)


@pytest.mark.parametrize("counts", [{"nodes": 0}, {"gpus_per_node": -1}, {"nodes": 1.5}])
def test_a_cluster_has_nodes_and_gpus(counts):
    with pytest.raises(ClusterError, match="at least 1"):
        Cluster("cpu-local", **counts)
