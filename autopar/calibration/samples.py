"""What was measured: seconds of work or of communication, beside what the cost model says of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from autopar.calibration.hardware import with_values
from autopar.ir.moves import Collective
from autopar.solver.costs.comm import Group, Links
from autopar.solver.costs.kernels import Kernels
from autopar.solver.costs.work import Work
from autopar.solver.hardware import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one call: the fastest and the median of some repeats.

    ``is_shared`` if other ranks belong to what was measured: they share caches and memory with it,
    in some repeats less than in training.
    """

    best_s: float
    median_s: float
    is_shared: bool = False

    @property
    def compute_s(self) -> float:
        """Seconds of compute: the fastest repeat, because whatever else runs only adds to it; the
        median where what else runs is other ranks.
        """
        return self.median_s if self.is_shared else self.best_s


class Sample(Protocol):
    """A measurement that the cost model has an opinion about."""

    @property
    def kind(self) -> str:
        """What is measured, in words; samples of one kind are reported together."""
        ...

    @property
    def timing(self) -> Timing: ...

    @property
    def measured_s(self) -> float:
        """Seconds that the cost model should say: of compute ``compute_s``; of communication the
        median, because waiting for each other is part of it.
        """
        ...

    def predicted_s(self, cluster: Cluster) -> float:
        """Seconds by the cost model."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSample:
    """Kernels by themselves, without autograd, that a rank runs while all others run the same."""

    kind: str
    work: Work
    timing: Timing
    backward: bool = False

    @property
    def measured_s(self) -> float:
        return self.timing.compute_s

    def predicted_s(self, cluster: Cluster) -> float:
        alone = with_values(cluster.hardware, {"chip.launch_s": 0.0})
        return Kernels(alone).seconds(self.work, backward=self.backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """A collective of ``group``; ``num_bytes`` is the size of the whole tensor, as in ``Links``."""

    collective: Collective
    num_bytes: int
    group: Group
    timing: Timing

    @property
    def kind(self) -> str:
        where = "in a node" if self.group.num_nodes == 1 else "between nodes"
        return f"{self.collective.value.replace('_', '-')} {where}"

    @property
    def measured_s(self) -> float:
        return self.timing.median_s

    def predicted_s(self, cluster: Cluster) -> float:
        return Links(cluster).seconds(self.collective, self.num_bytes, self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """So many bytes copied from host to device, and beside them as many back, while all ranks of
    the node do the same; on the CPU, which is both, a copy.
    """

    num_bytes: int
    timing: Timing
    kind: str = "copies between host and device"

    @property
    def measured_s(self) -> float:
        return self.timing.compute_s

    def predicted_s(self, cluster: Cluster) -> float:
        return self.num_bytes / cluster.hardware.host_link.rank_bytes_per_s(cluster.gpus_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSample:
    """A message to one rank, while ``sharing`` ranks of the node send one."""

    num_bytes: int
    crosses_nodes: bool
    sharing: int
    timing: Timing

    @property
    def kind(self) -> str:
        return f"message {'between nodes' if self.crosses_nodes else 'in a node'}"

    @property
    def measured_s(self) -> float:
        return self.timing.median_s

    def predicted_s(self, cluster: Cluster) -> float:
        return Links(cluster).message_seconds(
            self.num_bytes, crosses_nodes=self.crosses_nodes, sharing=self.sharing
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How well the cost model says what was measured of one kind.

    Attributes:
        error: Mean of ``|predicted / measured − 1|``.
        noise: Mean of ``median / fastest − 1`` over repeats: what no model can explain.
    """

    kind: str
    num_samples: int
    error: float
    noise: float


def agreement(samples: Iterable[Sample], cluster: Cluster) -> tuple[Agreement, ...]:
    """The agreement of every kind, in the order in which kinds occur."""
    by_kind: dict[str, list[Sample]] = {}
    for sample in samples:
        by_kind.setdefault(sample.kind, []).append(sample)
    return tuple(_agreement(kind, found, cluster) for kind, found in by_kind.items())


def _agreement(kind: str, samples: Sequence[Sample], cluster: Cluster) -> Agreement:
    timings = [sample.timing for sample in samples]
    return Agreement(
        kind=kind,
        num_samples=len(samples),
        error=statistics.fmean(
            abs(sample.predicted_s(cluster) / sample.measured_s - 1) for sample in samples
        ),
        noise=statistics.fmean(timing.median_s / timing.best_s - 1 for timing in timings),
    )


def log_error(sample: Sample, cluster: Cluster) -> float:
    """``log(predicted / measured)``: the residual of fits, alike for small and large times."""
    return math.log(max(sample.predicted_s(cluster), 1e-12) / sample.measured_s)
