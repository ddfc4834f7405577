"""A cluster: nodes of one kind of hardware."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path

from autopar.ir.errors import ClusterError
from autopar.ir.plan import ClusterRef
from autopar.solver.hardware.read import read_hardware
from autopar.solver.hardware.spec import Hardware, Precision


class Cluster:
    """The GPUs that a model may use.

    Args:
        name_or_file: Hardware that autopar knows (``a100-80gb``, ``a100-40gb``, ``h100-80gb``,
            ``cpu-local``), or a path to a TOML file of the same form.
        nodes: Number of nodes.
        gpus_per_node: Ranks in each node; default: what the hardware file says.

    Raises:
        ClusterError: Unknown hardware, a malformed file, or a count below 1.
    """

    def __init__(
        self, name_or_file: str | Path, *, nodes: int = 1, gpus_per_node: int | None = None
    ) -> None:
        self._name_or_file = name_or_file
        self.hardware, text = read_hardware(name_or_file)
        self.nodes = _count("nodes", nodes)
        given = self.hardware.gpus_per_node if gpus_per_node is None else gpus_per_node
        self.gpus_per_node = _count("gpus_per_node", given)
        counts = f"{self.nodes} {self.gpus_per_node}\n".encode()
        self.fingerprint = hashlib.sha256(counts + text).hexdigest()[:16]

    hardware: Hardware

    @property
    def name(self) -> str:
        """Name of the hardware."""
        return self.hardware.name

    @property
    def num_gpus(self) -> int:
        """Ranks of the whole cluster."""
        return self.nodes * self.gpus_per_node

    @property
    def device(self) -> str:
        """Type of the torch device that ranks compute on."""
        return self.hardware.device

    @property
    def backend(self) -> str:
        """The torch.distributed backend of its process groups."""
        return self.hardware.backend

    @property
    def default_precision(self) -> Precision:
        """What to compute in when nothing is said."""
        return self.hardware.precision

    @property
    def usable_bytes(self) -> int:
        """Memory of a rank that tensors, context and buffers may fill."""
        return self.hardware.chip.usable_bytes

    def with_nodes(self, nodes: int) -> Cluster:
        """The same hardware with another number of nodes."""
        return Cluster(self._name_or_file, nodes=nodes, gpus_per_node=self.gpus_per_node)

    def with_network(self, node_gbps: float) -> Cluster:
        """The same cluster with other links between its nodes.

        Args:
            node_gbps: Gigabits per second out of a node, all its links together, one direction.
        """
        if not 0 < node_gbps < math.inf:
            raise ClusterError(f"node_gbps is {node_gbps}; it must be a positive number")
        other = Cluster(self._name_or_file, nodes=self.nodes, gpus_per_node=self.gpus_per_node)
        network = replace(self.hardware.network, node_bytes_per_s=node_gbps * 1e9 / 8)
        other.hardware = replace(self.hardware, network=network)
        text = f"{self.fingerprint} {node_gbps}"
        other.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        return other

    def ref(self) -> ClusterRef:
        """The cluster as a plan names it."""
        return ClusterRef(
            hardware=self.name,
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            device=self.device,
            backend=self.backend,
            fingerprint=self.fingerprint,
        )

    def __repr__(self) -> str:
        return f"Cluster({self.name!r}, nodes={self.nodes}, gpus_per_node={self.gpus_per_node})"


def _count(name: str, count: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ClusterError(f"{name} is {count!r}; a cluster has at least 1")
    return count
