"""Seconds of work on one rank: a roofline whose efficiency depends on shape.

A product runs in tiles on the multiprocessors: partial tiles and a partial last wave are paid in
full, a depth that is no multiple of 32 is padded, and every tile pays for filling and emptying
its pipeline. Memory-bound kernels run at HBM speed. No kernel is faster than an empty one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.solver.costs.products import Product
from autopar.solver.costs.work import Attention, Work
from autopar.solver.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Kernels:
    """Times of kernels on a chip."""

    hardware: Hardware

    def seconds(self, work: Work, *, backward: bool = False) -> float:
        """Seconds of one direction of an op whose work is given in numbers."""
        if work.num_kernels == 0 and not work.bytes:
            return 0.0
        seconds = self.moving_seconds(float(work.bytes))
        if work.eager:
            seconds /= self.hardware.efficiency.eager
        seconds += sum(self.product_seconds(product) for product in work.products)
        if work.attention is not None:
            seconds += self.attention_seconds(work.attention, backward=backward)
        seconds = max(seconds, work.num_kernels * self.hardware.chip.kernel_s)
        if self.hardware.device == "cpu":  # the host computes: it cannot run ahead of itself
            seconds += work.num_kernels * self.hardware.chip.launch_s
        return seconds

    def peak(self, itemsize: int) -> float:
        """Dense peak FLOP/s of operands of this many bytes."""
        peak = self.hardware.chip.peak_flops
        return {2: peak.bf16, 4: peak.fp32, 8: peak.float64}.get(itemsize, peak.fp32)

    def moving_seconds(self, num_bytes: float) -> float:
        """Seconds of a kernel that reads and writes these bytes of memory."""
        return num_bytes / (self.hardware.chip.hbm_bytes_per_s * self.hardware.efficiency.hbm)

    def product_seconds(self, product: Product) -> float:
        """The best of some tile shapes, or the time to move the operands and the result."""
        chip, efficiency = self.hardware.chip, self.hardware.efficiency
        batch, rows, columns, depth = (
            int(product.batch),
            math.ceil(product.rows),  # routed experts have a fraction of a token where few
            int(product.columns),
            math.ceil(product.depth),
        )
        steps = -(-depth // 32) * 32 + efficiency.tile_ramp
        per_sm = self.peak(product.itemsize) / chip.num_sms * self.aligned_share(depth, columns)
        tiles = (
            (256, 128, efficiency.tile_256x128),
            (128, 256, efficiency.tile_256x128),
            (128, 128, efficiency.tile_128x128),
            (64, 64, efficiency.tile_64x64),
        )
        compute = min(
            -(-(-(-rows // height) * -(-columns // width) * batch) // chip.num_sms)
            * (2 * height * width * steps / (per_sm * share))
            for height, width, share in tiles
        )
        moved = batch * (rows * depth + depth * columns + rows * columns) * product.itemsize
        return max(compute, self.moving_seconds(moved))

    def aligned_share(self, *contiguous: int) -> float:
        """How much of its speed a product keeps whose rows have these numbers of elements: all
        where they are multiples of 64, less for multiples of 8, least where rows do not even start
        at multiples of 16 bytes.
        """
        efficiency = self.hardware.efficiency
        if any(size % 8 for size in contiguous):
            return efficiency.unaligned
        return efficiency.aligned_8 if any(size % 64 for size in contiguous) else 1.0

    def attention_seconds(self, attention: Attention, *, backward: bool) -> float:
        """A flash kernel: its share of the peak, less where heads are narrow or its thread blocks
        (of 128 queries, or of a whole head in version 1) leave multiprocessors idle.
        """
        chip, efficiency = self.hardware.chip, self.hardware.efficiency
        share = efficiency.flash_backward if backward else efficiency.flash_forward
        if attention.kernel == "flash_attention1":
            share *= efficiency.flash_1
        head_dim = float(attention.head_dim)
        padded = 1 << max(5, math.ceil(math.log2(head_dim)))
        blocks = int(attention.heads) * math.ceil(float(attention.queries) / 128)
        waves = blocks / chip.num_sms
        idle = math.ceil(waves) / waves if waves < 1 else 1.0
        flops = float(attention.flops) * padded / head_dim * idle
        return flops / (self.peak(attention.itemsize) * share)
