"""Seconds of what the runtime does with parameters beside the kernels of the model.

It adds gradients up, copies gathered parameters to where they are used, and at the end of a step
takes the norm and updates. All of it is bound by memory; where the host is what computes, each
parameter costs it time besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from autopar.solver.costs.kernels import Kernels
from autopar.solver.costs.memory import Itemsizes, Numel
from autopar.solver.hardware import Hardware

_WIDE = 4
"""Bytes of a gradient that is wider than what products write."""


@dataclass(frozen=True, slots=True)
class ParameterCosts:
    """Of so many parameters, ``num``, with so many elements together, ``numel``; of many blocks at
    once if both are arrays.
    """

    hardware: Hardware
    sizes: Itemsizes

    def adding_s(self, num: Numel, numel: Numel, *, num_micro_batches: int) -> Numel:
        """Gradients of a micro-batch are added to those of the ones before.

        Products add to gradients of 16 bits as they write them (Megatron-LM's fused accumulation).
        """
        touched = num * self.hardware.runtime.touch_s
        # a GPU's framework keeps the gradients of the only micro-batch as they are
        is_first_kept = num_micro_batches == 1 and self.hardware.device != "cpu"
        if is_first_kept or self.sizes.gradient < _WIDE:
            return touched
        return touched + numel * self._seconds(2 * self.sizes.gradient + self.sizes.compute)

    def copying_s(self, num: Numel, numel: Numel) -> Numel:
        """Gathered parameters are copied from all ranks' shards to where they are whole: beside a
        GPU's other kernels, before any other on the host.
        """
        if self.hardware.device != "cpu":
            return num * 0.0
        return num * self.hardware.runtime.touch_s + numel * self._seconds(2 * self.sizes.compute)

    def update_s(self, num: Numel, numel: Numel) -> Numel:
        """Clipping and the optimizer."""
        sizes, runtime = self.sizes, self.hardware.runtime
        master = sizes.master or sizes.compute
        touched = 2 * sizes.gradient + 2 * sizes.moments + 2 * master + sizes.compute
        of_elements = self._seconds(touched) + runtime.update_element_s
        return num * runtime.update_s + numel * of_elements

    def offload_s(self, numel: Numel, *, ranks: int) -> Numel:
        """Offloaded master weights and optimizer state come to the device, and go back at the same
        time, while so many ranks of the node do the same.
        """
        speed = self.hardware.host_link.rank_bytes_per_s(ranks)
        return numel * (self.sizes.offloaded / speed)

    def offloaded_update_s(self, num: Numel, numel: Numel, *, ranks: int) -> Numel:
        """As ``update_s``, of offloaded state. A GPU copies while it steps; the host, which is
        what copies, does one after the other. The first bucket's way here and the last one's back
        are left out.
        """
        update_s, copied_s = self.update_s(num, numel), self.offload_s(numel, ranks=ranks)
        if self.hardware.device == "cpu":
            return update_s + 2 * copied_s
        return cast("Numel", np.maximum(update_s, copied_s))

    def _seconds(self, num_bytes: float) -> float:
        return Kernels(self.hardware).moving_seconds(num_bytes)
