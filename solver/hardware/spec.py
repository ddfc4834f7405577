"""What a hardware file says. Every number in the file carries its source; here are the values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Precision = Literal["bf16", "fp32", "float64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakFlops:
    """Dense peak FLOP/s by dtype of the operands."""

    bf16: float
    fp32: float
    float64: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One GPU (or one CPU rank).

    Attributes:
        launch_s: What the host takes to launch a kernel. It runs ahead of the chip: a block takes
            no less than all its launches.
        kernel_s: The floor of a kernel on the chip.
    """

    num_sms: int
    hbm_bytes_per_s: float
    usable_bytes: int
    launch_s: float
    kernel_s: float
    peak_flops: PeakFlops


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the peaks that kernels reach on shapes that fill the chip.

    Attributes:
        tile_256x128, tile_128x128, tile_64x64: Products, by the tile of a multiprocessor.
        aligned_8, unaligned: Share that is left where rows are multiples of 8 elements but not of
            64, and where they are not.
        tile_ramp: Filling and emptying a tile's pipeline, as so much more depth of the product.
        flash_forward, flash_backward: FlashAttention 2 (backward counts recomputed scores).
        flash_1: FlashAttention 1, beside version 2.
        hbm: Memory-bound kernels.
        eager: Small ops by themselves, beside ``hbm``: casts, strided and broadcast operands, and
            gradients that are added up, which no graph shows.
    """

    tile_256x128: float
    tile_128x128: float
    tile_64x64: float
    tile_ramp: float
    aligned_8: float
    unaligned: float
    flash_forward: float
    flash_backward: float
    flash_1: float
    hbm: float
    eager: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What tensors cannot use.

    Attributes:
        context_bytes: Lost before the first tensor: driver, libraries, communicators.
        fragmentation: Lost to the allocator, as a share of what comes and goes within a step.
        overlap_fragmentation: The same once more where several micro-batches are in flight: what
            was made first is freed first, so that holes remain.
        reserve: Held by the allocator beside what is in use, as a share of that; it is given back
            when memory runs out, so that it fills no rank, but tools show it.
    """

    context_bytes: int
    fragmentation: float
    overlap_fragmentation: float
    reserve: float

    def lost_share(self, *, overlap: bool) -> float:
        """What the allocator loses of what comes and goes, as a share of it."""
        return self.fragmentation + (self.overlap_fragmentation if overlap else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A collective beside a ring: ``latency`` times the latency, ``bandwidth`` times the bandwidth
    that the ring's numbers let expect of it. Both are 1 where all collectives are rings.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLink:
    """Ring collectives inside a node, of ``n`` ranks.

    They take ``latency_s + n · latency_per_rank_s + traffic / bandwidth``.
    Bandwidth is ``bytes_per_s · (1 − lost_per_rank / n) · in_step``, the last for what other
    kernels of a training step take away. The numbers are those of all-reduces; the others and
    messages have a pace beside them.
    """

    bytes_per_s: float
    lost_per_rank: float
    in_step: float
    latency_s: float
    latency_per_rank_s: float
    all_gather: Pace
    reduce_scatter: Pace
    all_to_all: Pace
    message: Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Links out of a node, one direction, shared by all its ranks that talk to other nodes."""

    node_bytes_per_s: float
    efficiency: float
    latency_s: float

    @property
    def bytes_per_s(self) -> float:
        """What of it is reached."""
        return self.node_bytes_per_s * self.efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """Copies between a rank and the memory of its host, in each of both directions at once.

    Attributes:
        bytes_per_s: Of the link of one rank.
        node_bytes_per_s: Of all ranks of a node together: links that they share, and host memory.
        efficiency: What of either is reached.
    """

    bytes_per_s: float
    node_bytes_per_s: float
    efficiency: float

    def rank_bytes_per_s(self, ranks: int) -> float:
        """What each of so many ranks of a node reaches if all of them copy."""
        return min(self.bytes_per_s, self.node_bytes_per_s / ranks) * self.efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """``slowdown``: compute beside communication is longer by this share of the communication."""

    slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What the runtime adds to a step beside the kernels of the model, where the host is what
    computes; 0 where it runs ahead of its chip.

    Attributes:
        touch_s: Each time that it handles a parameter: its gradient is taken from a backward, or
            the parameter from what was gathered.
        update_s, update_element_s: A parameter at the end of a step, whose optimizer has kernels
            for each, and each of its elements beside the optimizer's traffic: the norm, clipping.
        step_s: Once a step: the batch is checked, and all ranks agree on loss and norm.
    """

    touch_s: float
    update_s: float
    update_element_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A hardware file: a chip, a node of them, links to host and other nodes, and the runtime."""

    name: str
    device: str
    backend: str
    gpus_per_node: int
    precision: Precision
    chip: Chip
    efficiency: Efficiency
    memory: Memory
    node_link: NodeLink
    network: Network
    host_link: HostLink
    overlap: Overlap
    runtime: Runtime
    sources: Mapping[str, str]
