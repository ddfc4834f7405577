"""Seconds of work on one rank: a roofline whose efficiency depends on shape.

A product runs in tiles on the multiprocessors: partial tiles and a partial last wave are paid in
full, and a depth that is no multiple of 32 is padded. Memory-bound kernels run at HBM speed, each
by itself (eager execution fuses nothing). No kernel is faster than its launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.solver.costs.products import Product
from autopar.solver.costs.work import Work
from autopar.solver.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Kernels:
    """Times of kernels on a chip."""

    hardware: Hardware

    def seconds(self, work: Work, *, backward: bool = False) -> float:
        """Seconds of one direction of an op whose work is given in numbers."""
        if work.num_kernels == 0:
            return 0.0
        chip, efficiency = self.hardware.chip, self.hardware.efficiency
        seconds = float(work.bytes) / (chip.hbm_bytes_per_s * efficiency.hbm)
        seconds += sum(self.product_seconds(product) for product in work.products)
        if work.attention is not None:
            share = efficiency.attention_backward if backward else efficiency.attention_forward
            seconds += float(work.attention.flops) / (self.peak(work.attention.itemsize) * share)
        return max(seconds, work.num_kernels * chip.launch_s)

    def peak(self, itemsize: int) -> float:
        """Dense peak FLOP/s of operands of this many bytes."""
        peak = self.hardware.chip.peak_flops
        return {2: peak.bf16, 4: peak.fp32, 8: peak.float64}.get(itemsize, peak.fp32)

    def product_seconds(self, product: Product) -> float:
        """The best of some tile shapes, or the time to move the operands and the result."""
        chip, efficiency = self.hardware.chip, self.hardware.efficiency
        batch, rows, columns, depth = (
            int(product.batch),
            math.ceil(product.rows),  # routed experts have a fraction of a token where few
            int(product.columns),
            math.ceil(product.depth),
        )
        padded = -(-depth // 32) * 32
        per_sm = self.peak(product.itemsize) / chip.num_sms
        tiles = (
            (256, 128, efficiency.tile_256x128),
            (128, 256, efficiency.tile_256x128),
            (128, 128, efficiency.tile_128x128),
            (64, 64, efficiency.tile_64x64),
        )
        compute = min(
            -(-(-(-rows // height) * -(-columns // width) * batch) // chip.num_sms)
            * (2 * height * width * padded / (per_sm * share))
            for height, width, share in tiles
        )
        moved = batch * (rows * depth + depth * columns + rows * columns) * product.itemsize
        return max(compute, moved / (chip.hbm_bytes_per_s * efficiency.hbm))
