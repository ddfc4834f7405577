"""A cluster: nodes of one kind of hardware."""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import replace
from pathlib import Path

from autopar.ir.errors import ClusterError
from autopar.ir.plan import ClusterRef
from autopar.solver.hardware.read import read_hardware
from autopar.solver.hardware.spec import Hardware, PeakFlops, Precision


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
        self.hardware, self._text = read_hardware(name_or_file)
        self.nodes = _count("nodes", nodes)
        given = self.hardware.gpus_per_node if gpus_per_node is None else gpus_per_node
        self.gpus_per_node = _count("gpus_per_node", given)

    hardware: Hardware
    _text: bytes  # of the hardware file, and of what was changed since

    @property
    def fingerprint(self) -> str:
        """Of all that plans depend on."""
        counts = f"{self.nodes} {self.gpus_per_node}\n".encode()
        return hashlib.sha256(counts + self._text).hexdigest()[:16]

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
        return self._with(nodes=_count("nodes", nodes))

    def with_gpus(self, num_gpus: int) -> Cluster:
        """The same hardware with so many GPUs: whole nodes, or a part of one.

        Raises:
            ClusterError: More than a node has, and no whole nodes.
        """
        _count("gpus", num_gpus)
        if num_gpus < self.gpus_per_node:
            return self._with(nodes=1, gpus_per_node=num_gpus)
        if num_gpus % self.gpus_per_node:
            raise ClusterError(
                f"{num_gpus} GPUs are no whole nodes of {self.gpus_per_node}",
                hint=f"a multiple of {self.gpus_per_node}, or fewer than that",
            )
        return self._with(nodes=num_gpus // self.gpus_per_node)

    def with_network(self, node_gbps: float) -> Cluster:
        """The same cluster with other links between its nodes.

        Args:
            node_gbps: Gigabits per second out of a node, all its links together, one direction.
        """
        if not 0 < node_gbps < math.inf:
            raise ClusterError(f"node_gbps is {node_gbps}; it must be a positive number")
        network = replace(self.hardware.network, node_bytes_per_s=node_gbps * 1e9 / 8)
        return self._changed(replace(self.hardware, network=network), f"node_gbps {node_gbps}")

    def scaled(
        self, *, compute: float = 1, memory: float = 1, node: float = 1, network: float = 1
    ) -> Cluster:
        """The cluster with so many times the FLOP/s, the bandwidth of memory, and that of the links
        inside nodes and between them; latencies and bytes of memory stay.
        """
        old, factors = self.hardware, (compute, memory, node, network)
        if not all(0 < factor < math.inf for factor in factors):
            raise ClusterError(f"a cluster scaled by {factors}; factors must be positive numbers")
        peaks = old.chip.peak_flops
        chip = replace(
            old.chip,
            hbm_bytes_per_s=memory * old.chip.hbm_bytes_per_s,
            peak_flops=PeakFlops(
                bf16=compute * peaks.bf16,
                fp32=compute * peaks.fp32,
                float64=compute * peaks.float64,
            ),
        )
        link = replace(old.node_link, bytes_per_s=node * old.node_link.bytes_per_s)
        between = replace(old.network, node_bytes_per_s=network * old.network.node_bytes_per_s)
        hardware = replace(old, chip=chip, node_link=link, network=between)
        return self._changed(hardware, f"scaled {factors}")

    def with_memory(self, usable_bytes: int) -> Cluster:
        """The same cluster with other memory: bytes of a rank that may be filled."""
        chip = replace(self.hardware.chip, usable_bytes=_count("usable_bytes", usable_bytes))
        return self._changed(replace(self.hardware, chip=chip), f"usable_bytes {usable_bytes}")

    def _changed(self, hardware: Hardware, text: str) -> Cluster:
        other = self._with()
        other.hardware, other._text = hardware, self._text + f"\n{text}".encode()
        return other

    def _with(self, *, nodes: int | None = None, gpus_per_node: int | None = None) -> Cluster:
        other = copy.copy(self)
        other.nodes = nodes or self.nodes
        other.gpus_per_node = gpus_per_node or self.gpus_per_node
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
