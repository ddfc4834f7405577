"""A cluster: nodes of one kind of hardware, or groups of such nodes."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from autopar.ir.errors import ClusterError
from autopar.ir.plan import ClusterRef, GroupRef
from autopar.solver.hardware.groups import NodeGroup, is_cluster_file, read_groups
from autopar.solver.hardware.read import find_file, hardware_of, read_toml
from autopar.solver.hardware.spec import Hardware, Network, PeakFlops, Precision


class Cluster:
    """The GPUs that a model may use.

    Args:
        name_or_file: Hardware that autopar knows (``a100-80gb``, ``a100-40gb``, ``h100-80gb``,
            ``cpu-local``), or a path to a TOML file of the same form; or to a cluster file, of
            several groups of nodes.
        nodes: Number of nodes; default: 1, or what the cluster file says.
        gpus_per_node: Ranks in each node; default: what the file says.

    Raises:
        ClusterError: Unknown hardware, a malformed file, or a count below 1.
    """

    def __init__(
        self,
        name_or_file: str | Path,
        *,
        nodes: int | None = None,
        gpus_per_node: int | None = None,
    ) -> None:
        path = find_file(name_or_file)
        document, text = read_toml(path)
        if is_cluster_file(document):
            if nodes is not None or gpus_per_node is not None:
                raise ClusterError(
                    "the cluster file says how many nodes and GPUs each of its groups has",
                    where=str(path),
                    hint="leave nodes and gpus_per_node out",
                )
            groups, between = read_groups(document, path)
            self._make_mixed([self._of_group(group) for group in groups], between)
            return
        self._hardware, self._text = hardware_of(document, path), text
        self.nodes = _count("nodes", 1 if nodes is None else nodes)
        given = self.hardware.gpus_per_node if gpus_per_node is None else gpus_per_node
        self.gpus_per_node = _count("gpus_per_node", given)

    _hardware: Hardware | None = None
    _text: bytes = b""  # of the hardware file, and of what was changed since
    _name: str | None = None
    _groups: tuple[Cluster, ...] = ()
    between: Network | None = None
    """Links out of a node towards other groups; None for nodes of one kind."""
    nodes: int
    """Nodes of all groups."""
    gpus_per_node: int
    """Ranks in each node; the fewest of any."""

    @classmethod
    def of_groups(cls, groups: Sequence[Cluster], between: Network) -> Cluster:
        """The cluster of groups of nodes of one kind each, in the order of ranks.

        Args:
            groups: Two or more.
            between: Links out of a node towards other groups.
        """
        made = object.__new__(cls)
        made._make_mixed(groups, between)
        return made

    @classmethod
    def _of_group(cls, group: NodeGroup) -> Cluster:
        """The nodes of one group as a cluster."""
        made = object.__new__(cls)
        made._hardware, made._text, made._name = group.hardware, group.text, group.name
        made.nodes, made.gpus_per_node = group.nodes, group.gpus_per_node
        return made

    def _make_mixed(self, groups: Sequence[Cluster], between: Network) -> None:
        self._groups, self.between = tuple(groups), between
        self.nodes = sum(group.nodes for group in groups)
        self.gpus_per_node = min(group.gpus_per_node for group in groups)

    @property
    def groups(self) -> tuple[Cluster, ...]:
        """Its groups of nodes of one kind, in the order of their ranks; itself where it has one."""
        return self._groups or (self,)

    @property
    def is_mixed(self) -> bool:
        """Whether it has several groups of nodes."""
        return bool(self._groups)

    @property
    def hardware(self) -> Hardware:
        """Of all its nodes, which are of one kind: of several groups each has its own."""
        assert self._hardware is not None, "groups of a cluster have hardware, not the cluster"
        return self._hardware

    @property
    def fingerprint(self) -> str:
        """Of all that plans depend on."""
        if self._groups:
            told = [group.name + group.fingerprint for group in self._groups]
            return hashlib.sha256(f"{told} {self.between}".encode()).hexdigest()[:16]
        counts = f"{self.nodes} {self.gpus_per_node}\n".encode()
        return hashlib.sha256(counts + self._text).hexdigest()[:16]

    @property
    def name(self) -> str:
        """Name of the hardware, or of a group; of several, all names."""
        if self._groups:
            return " + ".join(group.name for group in self._groups)
        return self._name or self.hardware.name

    @property
    def num_gpus(self) -> int:
        """Ranks of the whole cluster."""
        if self._groups:
            return sum(group.num_gpus for group in self._groups)
        return self.nodes * self.gpus_per_node

    @property
    def device(self) -> str:
        """Type of the torch device that ranks compute on."""
        return self.groups[0].hardware.device

    @property
    def backend(self) -> str:
        """The torch.distributed backend of its process groups."""
        return self.groups[0].hardware.backend

    @property
    def default_precision(self) -> Precision:
        """What to compute in when nothing is said."""
        return self.groups[0].hardware.precision

    @property
    def usable_bytes(self) -> int:
        """Memory of a rank that tensors, context and buffers may fill; the least of any rank."""
        return min(group.hardware.chip.usable_bytes for group in self.groups)

    def peak_flops(self, precision: str, *, num_gpus: int) -> float:
        """Dense peak FLOP/s of the first ``num_gpus`` ranks together, in a precision (fp16 is like
        bf16).
        """
        name, left, found = "bf16" if precision == "fp16" else precision, num_gpus, 0.0
        for group in self.groups:
            used = min(left, group.num_gpus)
            found += used * getattr(group.hardware.chip.peak_flops, name)
            left -= used
        return found

    def reordered(self, order: Sequence[int]) -> Cluster:
        """The cluster with its groups in another order of ranks: positions of ``groups``; empty: as
        they are.
        """
        if not order or tuple(order) == tuple(range(len(self._groups))):
            return self
        assert self.between is not None
        return self.of_groups([self._groups[place] for place in order], self.between)

    def with_nodes(self, nodes: int) -> Cluster:
        """The same hardware with another number of nodes.

        Raises:
            ClusterError: It has several groups of nodes.
        """
        _count("nodes", nodes)
        if self._groups:
            raise ClusterError(
                f"{nodes} nodes of {self.name}: nobody says of which group",
                hint="a cluster file with other numbers of nodes",
            )
        return self._with(nodes=nodes)

    def repeated(self, times: int) -> Cluster:
        """So many times the nodes of each of its groups."""
        if not self._groups:
            return self.with_nodes(times * self.nodes)
        return self._changed_groups(lambda group: group.with_nodes(times * group.nodes))

    def with_gpus(self, num_gpus: int) -> Cluster:
        """The same hardware with so many GPUs: whole nodes, or a part of one.

        Raises:
            ClusterError: More than a node has, and no whole nodes; or several groups of nodes,
                which have others.
        """
        _count("gpus", num_gpus)
        if self._groups:
            if num_gpus == self.num_gpus:
                return self
            raise ClusterError(
                f"{num_gpus} GPUs of {self.name}: nobody says of which group",
                hint=f"all {self.num_gpus} of them, or a cluster file for each choice",
            )
        if num_gpus < self.gpus_per_node:
            return self._with(nodes=1, gpus_per_node=num_gpus)
        if num_gpus % self.gpus_per_node:
            raise ClusterError(
                f"{num_gpus} GPUs are no whole nodes of {self.gpus_per_node}",
                hint=f"a multiple of {self.gpus_per_node}, or fewer than that",
            )
        return self._with(nodes=num_gpus // self.gpus_per_node)

    def with_network(self, node_gbps: float) -> Cluster:
        """The same cluster with other links between its nodes, those between groups included.

        Args:
            node_gbps: Gigabits per second out of a node, all its links together, one direction.
        """
        if not 0 < node_gbps < math.inf:
            raise ClusterError(f"node_gbps is {node_gbps}; it must be a positive number")
        speed = node_gbps * 1e9 / 8
        return self._changed(
            lambda old: replace(old, network=replace(old.network, node_bytes_per_s=speed)),
            f"node_gbps {node_gbps}",
            between=lambda old: replace(old, node_bytes_per_s=speed),
        )

    def scaled(
        self, *, compute: float = 1, memory: float = 1, node: float = 1, network: float = 1
    ) -> Cluster:
        """The cluster with so many times the FLOP/s, the bandwidth of memory, and that of the links
        inside nodes and between them; latencies and bytes of memory stay.
        """
        factors = (compute, memory, node, network)
        if not all(0 < factor < math.inf for factor in factors):
            raise ClusterError(f"a cluster scaled by {factors}; factors must be positive numbers")

        def faster(old: Network) -> Network:
            return replace(old, node_bytes_per_s=network * old.node_bytes_per_s)

        def change(old: Hardware) -> Hardware:
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
            return replace(old, chip=chip, node_link=link, network=faster(old.network))

        return self._changed(change, f"scaled {factors}", between=faster)

    def with_memory(self, usable_bytes: int) -> Cluster:
        """The same cluster with other memory: bytes of every rank that may be filled."""
        _count("usable_bytes", usable_bytes)
        return self._changed(
            lambda old: replace(old, chip=replace(old.chip, usable_bytes=usable_bytes)),
            f"usable_bytes {usable_bytes}",
        )

    def with_more_memory(self, num_bytes: int) -> Cluster:
        """The same cluster with so many bytes more that every rank may fill."""
        if not self._groups:
            return self.with_memory(self.usable_bytes + num_bytes)
        return self._changed_groups(lambda group: group.with_more_memory(num_bytes))

    def with_hardware(self, hardware: Hardware, text: str = "") -> Cluster:
        """As many nodes and ranks of other hardware, which ``text`` tells from that of the file."""
        other = self._with()
        other._hardware, other._text = hardware, self._text + f"\n{text}".encode()
        return other

    def _changed(
        self,
        change: Callable[[Hardware], Hardware],
        text: str,
        *,
        between: Callable[[Network], Network] = lambda old: old,
    ) -> Cluster:
        """With changes of the hardware of each group, and of the links between groups."""
        if not self._groups:
            return self.with_hardware(change(self.hardware), text)
        return self._changed_groups(lambda group: group._changed(change, text), between)

    def _changed_groups(
        self,
        change: Callable[[Cluster], Cluster],
        between: Callable[[Network], Network] = lambda old: old,
    ) -> Cluster:
        assert self.between is not None
        return self.of_groups([change(group) for group in self._groups], between(self.between))

    def _with(self, *, nodes: int | None = None, gpus_per_node: int | None = None) -> Cluster:
        other = copy.copy(self)
        other.nodes = nodes or self.nodes
        other.gpus_per_node = gpus_per_node or self.gpus_per_node
        return other

    def ref(self, order: Sequence[int] = ()) -> ClusterRef:
        """The cluster as a plan names it, with its groups in the order of ranks."""
        groups = self.reordered(order)._groups
        return ClusterRef(
            hardware=self.name,
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            device=self.device,
            backend=self.backend,
            fingerprint=self.fingerprint,
            groups=tuple(
                GroupRef(name=group.name, nodes=group.nodes, gpus_per_node=group.gpus_per_node)
                for group in groups
            ),
        )

    def __repr__(self) -> str:
        if self._groups:
            return f"Cluster({', '.join(map(repr, self._groups))})"
        return f"Cluster({self.name!r}, nodes={self.nodes}, gpus_per_node={self.gpus_per_node})"


def _count(name: str, count: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ClusterError(f"{name} is {count!r}; a cluster has at least 1")
    return count
