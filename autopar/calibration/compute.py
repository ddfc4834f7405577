"""Compute of a rank while all others compute: products, attention, elementwise kernels, models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from autopar.calibration.clock import (
    Call,
    Clock,
    MeetingClock,
    WallClock,
    compute_clock,
    measure,
    wall_clock,
)
from autopar.calibration.communication import Communication
from autopar.calibration.effort import Effort, Shape
from autopar.calibration.parameters import Parameters, ParameterSample
from autopar.calibration.samples import HostSample, Timing, WorkSample
from autopar.calibration.small_model import ModelSize, training_of
from autopar.ir.plan import PrecisionName
from autopar.ir.precision import DTYPES
from autopar.runtime.host_copies import HostCopies
from autopar.solver.costs.products import Product
from autopar.solver.costs.work import Attention, Work

Agree = Callable[[Timing], Timing]
"""Makes one timing of those of all ranks, who meet in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Measures compute on a device.

    Attributes:
        clock: For what the device computes.
        agree: Called after each measurement, so that all ranks measure the same at once.
    """

    device: torch.device
    clock: Clock
    effort: Effort
    agree: Agree

    @classmethod
    def on(cls, device: torch.device, effort: Effort, talk: Communication) -> Compute:
        """For all ranks of this machine, who ``talk``."""
        clock = compute_clock(device, ranks=talk.per_node)
        if device.type == "cpu" and talk.per_node > 1:
            clock = MeetingClock(clock, talk.slowest)
        return cls(device=device, clock=clock, effort=effort, agree=talk.agree)

    def products(self, precision: PrecisionName) -> Iterator[WorkSample]:
        """Products of the shapes of ``effort``, as forward and backward have them."""
        for shape in self.effort.products:
            yield self._product(shape, precision)

    def other_products(self, precision: PrecisionName) -> Iterator[WorkSample]:
        """A few products in a dtype that the hardware does not train in."""
        for shape in self.effort.other_products:
            yield self._product(shape, precision)

    def _product(self, shape: Shape, precision: PrecisionName) -> WorkSample:
        batch, rows, columns, depth = shape
        dtype = DTYPES[precision]
        left = self._tensor((batch, rows, depth), dtype)
        right = self._tensor((batch, columns, depth), dtype).transpose(1, 2)
        if batch == 1:
            left, right = left[0], right[0]
        product = Product(
            batch=batch, rows=rows, columns=columns, depth=depth, itemsize=dtype.itemsize
        )
        return WorkSample(
            kind=f"products in {precision}",
            work=Work(products=(product,), num_kernels=1),
            timing=self._time(lambda: left @ right),
        )

    def attention(self, precision: PrecisionName) -> Iterator[WorkSample]:
        """Causal attention, forward and backward."""
        dtype = DTYPES[precision]
        for sequences, heads, length, head_dim in self.effort.attentions:
            shape = (sequences, heads, length, head_dim)
            query, key, value = (self._tensor(shape, dtype).requires_grad_() for _ in range(3))
            work = Attention(
                kernel="flash_attention2",
                flops=2 * sequences * heads * length * length * head_dim,  # half of 4, causal
                heads=sequences * heads,
                queries=length,
                head_dim=head_dim,
                itemsize=dtype.itemsize,
            )
            run = _attention_of(query, key, value)
            with torch.no_grad():
                forward = self._time(run)
            result = run()
            gradient = torch.randn_like(result)
            yield WorkSample(
                kind="attention forward",
                work=Work(attention=work, num_kernels=1),
                timing=forward,
            )
            again = replace(work, flops=5 * work.flops // 2)  # as costs.work counts it
            yield WorkSample(
                kind="attention backward",
                work=Work(attention=again, num_kernels=2),
                timing=self._time(_backward_of(result, (query, key, value), gradient)),
                backward=True,
            )

    def elementwise(self, precision: PrecisionName) -> Iterator[WorkSample]:
        """Memory-bound kernels: reads and writes of a product, a sum, an activation, a copy."""
        dtype = DTYPES[precision]
        for numel in self.effort.elements:
            left, right = self._tensor((numel,), dtype), self._tensor((numel,), dtype)
            for call, passes in _elementwise(left, right):
                yield WorkSample(
                    kind=f"elementwise in {precision}",
                    work=Work(bytes=passes * numel * dtype.itemsize, num_kernels=1),
                    timing=self._time(call),
                )

    def tiny_model(self) -> Timing:
        """A model that takes the host longer than the device, which nothing waits for."""
        clock: Clock = self.clock if self.device.type == "cpu" else WallClock()
        effort, dtype = self.effort, torch.float32
        train = training_of(effort.tiny_model, self.device, dtype)
        return self.agree(measure(clock, train, target_s=effort.target_s, samples=effort.samples))

    def models(self, precision: PrecisionName) -> Iterator[tuple[ModelSize, Timing]]:
        """Models whose kernels count."""
        for size in self.effort.models:
            yield size, self._time(training_of(size, self.device, DTYPES[precision]))

    def parameters(self) -> Iterator[ParameterSample]:
        """What the runtime does with parameters in a step."""
        for sizes in self.effort.parameters:
            handled = Parameters(sizes, self.device)
            timing = self._time(handled.update)
            yield ParameterSample(what="update", sizes=sizes, timing=timing)
        # large gradients say nothing by themselves: in a step they are not in the caches
        for sizes in self.effort.parameters[:1]:
            timing = self._time(Parameters(sizes, self.device).take_gradients)
            yield ParameterSample(what="gradients", sizes=sizes, timing=timing)

    def host_copies(self) -> HostSample:
        """Copies between device and host, in both directions at once where there are two."""
        copies, numel = HostCopies(self.device), self.effort.copied_bytes // 4
        here, there = torch.zeros(numel, device=self.device), copies.zeros((numel,), torch.float32)
        back = copies.zeros((numel,), torch.float32)

        def both() -> None:
            coming = copies.bring([there])
            copies.send([here], [back]).finish()
            coming.finish()

        is_cpu = self.device.type == "cpu"
        call = (lambda: copies.bring([there])) if is_cpu else both
        clock = self.clock if is_cpu else wall_clock(self.device)
        return HostSample(num_bytes=4 * numel, timing=self._time(call, clock))

    def kernel(self) -> Timing:
        """An empty kernel, and the gap to the next: tiny kernels that wait behind a long one."""
        tiny, num = torch.zeros(8, device=self.device), self.effort.chain
        long = None if self.device.type == "cpu" else self._tensor((8192, 8192), torch.float32)

        def call() -> None:
            for _ in range(num):
                tiny.neg_()

        samples = []
        for _ in range(self.effort.samples + 1):
            if long is not None:
                torch.mm(long, long)  # the host is ahead when the tiny ones start
            samples.append(self.clock.elapsed_s(call, 1) / num)
        samples = sorted(samples[1:])
        found = Timing(
            best_s=samples[0],
            median_s=samples[len(samples) // 2],
            is_shared=isinstance(self.clock, MeetingClock),
        )
        return self.agree(found)

    def _time(self, call: Call, clock: Clock | None = None) -> Timing:
        effort = self.effort
        return self.agree(
            measure(clock or self.clock, call, target_s=effort.target_s, samples=effort.samples)
        )

    def _tensor(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)


def _attention_of(query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    return lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _backward_of(result: Tensor, leaves: tuple[Tensor, ...], gradient: Tensor) -> Call:
    return lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True)


def _elementwise(left: Tensor, right: Tensor) -> tuple[tuple[Call, int], ...]:
    return (
        (lambda: left * right, 3),
        (lambda: left + 1.0, 2),
        (lambda: functional.silu(left), 2),
        (lambda: left.clone(), 2),
    )
