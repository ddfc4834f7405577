"""The numbers that are fitted: names in a hardware file, what they mean, and what is plausible.

None depends on a series, a framework, a file or a model: a number is a property of the chip, its
kernels, the links, or of PyTorch's allocator. What was measured apart from training (bandwidth and
latencies of collectives by nccl-tests, the floor of a kernel) is not fitted. Prints the table of
the docs: `python -m benchmarks.fit.numbers`.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.calibration.fit import Free
from autopar.calibration.hardware import value_at
from autopar.solver import Cluster
from autopar.solver.costs.fusion import SCORE_PASSES
from autopar.solver.costs.saved import PACKED_TENSORS
from autopar.solver.hardware import Hardware


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
        meaning="share of peak, products in tiles of 256 × 128",
    ),
    Fitted(
        path="efficiency.tile_128x128",
        low=0.5,
        high=0.9,
        meaning="share of peak, products in tiles of 128 × 128",
    ),
    Fitted(
        path="efficiency.tile_64x64",
        low=0.2,
        high=0.8,
        meaning="share of peak, products in tiles of 64 × 64",
    ),
    Fitted(
        path="efficiency.tile_ramp",
        low=0,
        high=1000,
        scale=300,
        meaning="filling and emptying a tile's pipeline, as depth",
    ),
    Fitted(
        path="efficiency.aligned_8",
        low=0.7,
        high=1.0,
        meaning="what products keep of it: rows in eights, not 64s",
    ),
    Fitted(
        path="efficiency.unaligned",
        low=0.2,
        high=1.0,
        meaning="what products keep of it: rows not in eights",
    ),
    Fitted(
        path="efficiency.flash_forward",
        low=0.4,
        high=0.72,
        meaning="share of peak, FlashAttention 2, forward",
    ),
    Fitted(
        path="efficiency.flash_backward",
        low=0.35,
        high=0.65,
        meaning="share of peak, FlashAttention 2, backward",
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
        meaning="PyTorch's small ops, beside `efficiency.hbm`",
    ),
    Fitted(
        path="chip.launch_s",
        low=3e-5,
        high=1e-4,
        meaning="seconds of the host for a kernel of a step",
    ),
    Fitted(
        path="node_link.in_step",
        low=0.5,
        high=1.0,
        meaning="share of nccl-tests' bandwidth in a training step",
    ),
    Fitted(
        path="network.efficiency",
        low=0.1,
        high=1.0,
        meaning="share of the network's bandwidth that is reached",
    ),
    Fitted(
        path="network.latency_s",
        low=1e-6,
        high=1e-4,
        meaning="seconds of a hop between nodes",
    ),
)
"""Fitted to step times."""

MEMORY = (
    Fitted(
        path="memory.context_bytes",
        low=0.25 * 2**30,
        high=4 * 2**30,
        meaning="driver, libraries, communicators",
    ),
    Fitted(
        path="memory.fragmentation",
        low=0,
        high=0.2,
        meaning="lost of what comes and goes in a step",
    ),
    Fitted(
        path="memory.overlap_fragmentation",
        low=0,
        high=0.1,
        meaning="lost besides, with micro-batches in flight",
    ),
    Fitted(
        path="memory.reserve",
        low=0,
        high=0.4,
        meaning="what nvidia-smi shows beyond what is in use",
    ),
)
"""Fitted to which runs ran out of memory (the first three) and to nvidia-smi (the last)."""

WHOLE = (
    ("eager", "scale, mask, cast, softmax, cast by themselves"),
    ("fused_softmax", "scale, mask and softmax in one kernel"),
    ("fused_causal_softmax", "of half of the scores"),
)
"""Passes over the scores, forward and backward, of attention that writes them to memory: whole
numbers (``SCORE_PASSES``), chosen between 2 and 20 with the same rows. They are held here."""

PACKED_MEANING = "of the size of queries, kept besides"

NUM_FITTED = len(TIMES) + len(MEMORY) + 2 * len(WHOLE) + 1  # PACKED_TENSORS, chosen like passes
assert NUM_FITTED <= 30


def page_table(hardware: Hardware) -> str:
    """The fitted numbers as docs/concepts/costs.md shows them."""
    lines = ["| number | value | plausible | meaning |", "|---|---|---|---|"]
    for number in (*TIMES, *MEMORY):
        value = value_at(hardware, number.path)
        shown = f"{value / 2**30:g} GiB" if number.path.endswith("_bytes") else f"{value:g}"
        plausible = number.plausible.removeprefix("plausible ")
        lines.append(f"| `{number.path}` | {shown} | {plausible} | {number.meaning} |")
    for name, meaning in WHOLE:
        passes = " and ".join(map(str, SCORE_PASSES[name]))
        lines.append(f"| passes, `{name}` | {passes} | 2 to 20 | {meaning} |")
    lines.append(f"| tensors, `flash_attention1` | {PACKED_TENSORS} | 0 to 3 | {PACKED_MEANING} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page_table(Cluster("a100-80gb").hardware))
