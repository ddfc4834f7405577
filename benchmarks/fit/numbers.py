"""The numbers that are fitted: names in a hardware file, what they mean, and what is plausible.

None depends on a series, a framework, a file or a model: a number is a property of the chip, its
kernels, the links, or of PyTorch's allocator. What was measured apart from training (bandwidth and
latencies of collectives by nccl-tests, the floor of a kernel) is not fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.calibration.fit import Free


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A number of the hardware file.

    Attributes:
        low, high: What is plausible; the fit stays inside.
        scale: Size of a typical change, where ``low`` is 0.
        meaning: In a line.
    """

    path: str
    low: float
    high: float
    meaning: str
    scale: float = 1.0

    @property
    def plausible(self) -> str:
        """The range, as hardware files say it."""
        if self.path.endswith("_bytes"):
            return f"plausible {self.low / 2**30:g} to {self.high / 2**30:g} GiB"
        return f"plausible {self.low:g} to {self.high:g}"

    @property
    def free(self) -> Free:
        return Free(path=self.path, low=self.low, high=self.high, scale=self.scale)


TIMES = (
    Fitted(
        path="efficiency.tile_256x128",
        low=0.6,
        high=0.95,
        meaning="share of the peak of products in tiles of 256 × 128",
    ),
    Fitted(
        path="efficiency.tile_128x128",
        low=0.5,
        high=0.9,
        meaning="share of the peak of products in tiles of 128 × 128",
    ),
    Fitted(
        path="efficiency.tile_64x64",
        low=0.2,
        high=0.8,
        meaning="share of the peak of products in tiles of 64 × 64",
    ),
    Fitted(
        path="efficiency.tile_ramp",
        low=0,
        high=1000,
        scale=300,
        meaning="filling and emptying a tile's pipeline, in elements of depth",
    ),
    Fitted(
        path="efficiency.aligned_8",
        low=0.7,
        high=1.0,
        meaning="what products keep whose rows are multiples of 8 elements, but not of 64",
    ),
    Fitted(
        path="efficiency.unaligned",
        low=0.2,
        high=1.0,
        meaning="what products keep whose rows are no multiples of 8 elements",
    ),
    Fitted(
        path="efficiency.flash_forward",
        low=0.4,
        high=0.72,
        meaning="share of the peak of FlashAttention 2, forward",
    ),
    Fitted(
        path="efficiency.flash_backward",
        low=0.35,
        high=0.65,
        meaning="share of the peak of FlashAttention 2, backward",
    ),
    Fitted(
        path="efficiency.flash_1",
        low=0.3,
        high=1.0,
        meaning="FlashAttention 1 beside version 2",
    ),
    Fitted(
        path="efficiency.hbm",
        low=0.6,
        high=0.92,
        meaning="share of memory bandwidth of memory-bound kernels",
    ),
    Fitted(
        path="efficiency.eager",
        low=0.2,
        high=1.0,
        meaning="PyTorch's small ops by themselves, beside other memory-bound kernels",
    ),
    Fitted(
        path="chip.launch_s",
        low=3e-5,
        high=1e-4,
        meaning="seconds of the host for an op of a training step",
    ),
    Fitted(
        path="node_link.in_step",
        low=0.5,
        high=1.0,
        meaning="share of nccl-tests' bandwidth that a node's links have in a training step",
    ),
    Fitted(
        path="network.efficiency",
        low=0.1,
        high=1.0,
        meaning="share of the network's bandwidth that collectives reach between nodes",
    ),
    Fitted(
        path="network.latency_s",
        low=1e-6,
        high=1e-4,
        meaning="seconds of a hop of a collective, or of a message, between nodes",
    ),
    Fitted(
        path="overlap.slowdown",
        low=0,
        high=1.0,
        scale=0.3,
        meaning="seconds that a second of communication beside compute adds to it",
    ),
)
"""Fitted to step times."""

MEMORY = (
    Fitted(
        path="memory.context_bytes",
        low=0.5 * 2**30,
        high=4 * 2**30,
        meaning="bytes that driver, libraries and communicators take",
    ),
    Fitted(
        path="memory.fragmentation",
        low=0,
        high=0.15,
        meaning="share of what comes and goes in a step that the allocator loses",
    ),
    Fitted(
        path="memory.eager_fragmentation",
        low=0,
        high=0.4,
        meaning="share of kept activations that it loses besides where norms are several kernels",
    ),
    Fitted(
        path="memory.reserve",
        low=0,
        high=0.4,
        meaning="what nvidia-smi shows beyond what is in use, as a share of it",
    ),
)
"""Fitted to which runs ran out of memory (the first three) and to nvidia-smi (the last)."""

WHOLE = (
    ("eager", "softmax in PyTorch ops: scale, mask, cast, softmax, cast"),
    ("fused_softmax", "one kernel for scale, mask and softmax"),
    ("fused_causal_softmax", "Megatron-LM's, which reads half of the scores"),
)
"""Passes over the scores, forward and backward, of attention that writes them to memory: whole
numbers (``SCORE_PASSES``), chosen between 2 and 20 with the same rows. They are held here."""

NUM_FITTED = len(TIMES) + len(MEMORY) + 2 * len(WHOLE)
assert NUM_FITTED <= 30
