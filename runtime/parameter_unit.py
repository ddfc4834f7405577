"""Parameters that the same segments use: stored as shards, gathered, freed and reduced together.

All buffers are flat. A *shard buffer* holds one chunk of every parameter, one after the other; an
all-gather of shard buffers gives ``[num_shards, shard numel]``, in which chunk i of every parameter
is in row i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.runtime.communicator import Group, Work
from autopar.runtime.host_copies import HostCopies
from autopar.runtime.parameter_layout import ParameterLayout, master_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitGroups:
    """Groups over which a unit communicates.

    ``shard`` gathers parameters and scatters gradients (None: every rank holds all), ``replicate``
    sums gradients after that, ``tensor`` sums those that are partial on the tensor axis. Data,
    context and expert axes that use the parameters whole are part of ``shard`` or ``replicate``.
    """

    shard: Group | None
    replicate: Group
    tensor: Group


class ParameterUnit:
    """See the module.

    Args:
        layouts: Parameters whose gradients are partial on the tensor axis first, those sharded on
            it last.
        trainable: Whether they take gradients.
        compute_dtype: Type in which segments use them. Frozen ones are stored in it too.
        is_partial: Their gradients differ between ranks of ``shard`` and ``replicate`` and are
            summed; otherwise each has the sum.
        counts: False where another rank of these groups has the same gradients, and gives them to
            the sum.
        gradient_dtype: In which gradients are accumulated.
        reduce_dtype: In which they are sent to be summed.
        host: Keeps master weights of trained parameters where these are wider than
            ``compute_dtype``: the device has a shard in that then. None: all is on the device.
    """

    def __init__(
        self,
        layouts: Sequence[ParameterLayout],
        *,
        trainable: bool,
        compute_dtype: torch.dtype,
        is_partial: bool,
        counts: bool,
        gradient_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        groups: UnitGroups,
        device: torch.device,
        host: HostCopies | None = None,
    ) -> None:
        self.layouts = tuple(layouts)
        self.trainable = trainable
        self._is_partial, self._counts = is_partial, counts
        self._groups = groups
        self._dtype = compute_dtype
        self._gradient_dtype, self._reduce_dtype = gradient_dtype, reduce_dtype
        self._master_dtype = master_dtype(compute_dtype) if trainable else compute_dtype
        self._num_shards = 1 if groups.shard is None else groups.shard.size
        self._offsets = _offsets([layout.chunk_numel for layout in layouts])
        self._shard_numel = self._offsets[-1]
        self._device, self.is_offloaded = device, host is not None and trainable
        self._master = self._shard = torch.zeros(
            self._shard_numel, dtype=self._master_dtype, device=device
        )
        if host is not None and self._master_dtype != compute_dtype:
            self._master = host.zeros((self._shard_numel,), self._master_dtype)
            self._shard = self._shard.to(compute_dtype)
        self.parameters: Mapping[str, nn.Parameter] = {
            layout.name: nn.Parameter(
                self._shard_view(self._master, index), requires_grad=trainable
            )
            for index, layout in enumerate(layouts)
        }
        self._is_stored_whole = self._num_shards == 1 and self._shard.dtype == compute_dtype
        self._buffer = self._make_buffer(device)
        self.tensors: Mapping[str, Tensor] = self._make_tensors()
        self._gathering: tuple[Work, Tensor] | None = None
        self._is_gathered = True
        self.free()
        self._accumulated: Tensor | None = None
        self.gradient: Tensor | None = None
        self.held: HeldGradients | None = None  # takes gradients as they come, for later

    def start_gather(self) -> None:
        """Start to bring all shards together; ``finish_gather`` gives ``tensors`` their values."""
        if self._is_gathered or self._gathering is not None or self._num_shards == 1:
            return
        assert self._groups.shard is not None
        shard = self._shard.to(self._dtype)
        gathered = shard.new_empty(self._num_shards * self._shard_numel)
        self._gathering = (self._groups.shard.start_all_gather(gathered, shard), gathered)

    def finish_gather(self) -> None:
        """Wait for the gather. What autograd saved in forward has its values again."""
        if self._is_gathered:
            return
        # as FSDP2 does: what autograd saved are views of this buffer, with the same values again
        keep_version = torch.autograd._unsafe_preserve_version_counter  # pyright: ignore[reportPrivateUsage]
        with torch.no_grad(), keep_version(self._buffer):
            storage, num_bytes = self._buffer.untyped_storage(), self._buffer.nbytes
            if storage.nbytes() != num_bytes:  # of the same size it would be allocated anew, too
                storage.resize_(num_bytes)
            if self._num_shards == 1:
                self._buffer.copy_(self._shard)
            else:
                assert self._gathering is not None, "gathered parameters are used without a gather"
                work, gathered = self._gathering
                work.wait()
                chunks = gathered.view(self._num_shards, self._shard_numel)
                for index, layout in enumerate(self.layouts):
                    layout.copy_from_chunks(self._buffer_view(index), self._columns(chunks, index))
        self._gathering = None
        self._is_gathered = True

    def free(self) -> None:
        """Give the gathered tensors' memory back."""
        if not self._is_stored_whole:
            self.outdate()
            self._buffer.untyped_storage().resize_(0)

    def outdate(self) -> None:
        """The shards changed: what was gathered is no longer true."""
        self._is_gathered = self._is_stored_whole

    def start_reduce(self, *, is_last: bool) -> Iterator[Work]:
        """Reduce what was accumulated into ``gradient``: yields each communication, to be waited
        for by the caller.

        Args:
            is_last: No more gradients come in this step: sum over all remaining axes.
        """
        accumulated = self._take_accumulated()
        if self._groups.shard is None or self._num_shards == 1:
            reduced = accumulated
        elif not self._is_partial:
            reduced = accumulated.chunk(self._num_shards)[self._groups.shard.rank].clone()
        else:
            sent = accumulated.to(self._reduce_dtype)
            reduced = sent.new_empty(self._shard_numel)
            yield self._groups.shard.start_reduce_scatter(reduced, sent)
            del sent
            reduced = reduced.to(self._gradient_dtype)
        del accumulated
        self.gradient = reduced if self.gradient is None else self.gradient.add_(reduced)
        if not is_last:
            return
        if self._is_partial and self._groups.replicate.size > 1:
            yield from self.start_sum(self.gradient, self._groups.replicate)
        num_partial = self._numel_where(lambda layout: layout.is_tensor_partial)
        if self._groups.tensor.size > 1 and num_partial:
            yield from self.start_sum(self.gradient[:num_partial], self._groups.tensor)

    def start_sum(self, gradient: Tensor, group: Group) -> Iterator[Work]:
        """Sum part of ``gradient`` over a group, in place, as ``start_reduce`` does it."""
        sent = gradient.to(self._reduce_dtype)
        yield group.start_all_reduce(sent)
        if sent is not gradient:
            gradient.copy_(sent)

    def gradient_of(self, name: str) -> Tensor:
        """The chunk (with padding) of a parameter in ``gradient``."""
        index = [layout.name for layout in self.layouts].index(name)
        assert self.gradient is not None
        return self.gradient[self._offsets[index] : self._offsets[index + 1]]

    def attach_gradients(self) -> None:
        """Make ``gradient`` the gradients of ``parameters``, in their type; of those on the host
        only when they come to the device.
        """
        assert self.gradient is not None
        self.gradient = self.gradient.to(self._master_dtype)
        if not self.is_offloaded:
            for index, parameter in enumerate(self.parameters.values()):
                parameter.grad = self.gradient_view(index)

    def gradient_view(self, index: int) -> Tensor:
        """The gradient of a parameter: of its shard, without padding."""
        assert self.gradient is not None
        return self._shard_view(self.gradient, index)

    def master_on_host(self, first: int, end: int) -> Tensor | None:
        """Master weights of parameters ``[first, end)``, with padding; None where they are on the
        device.
        """
        if self._master is self._shard:
            return None
        return self._master[self._offsets[first] : self._offsets[end]]

    def part_of(self, run: Tensor, index: int, first: int) -> Tensor:
        """The shard of a parameter in a run of them that begins with parameter ``first``."""
        return self._shard_view(run, index, self._offsets[first])

    def take_master(self, run: Tensor, first: int, end: int) -> None:
        """Use updated master weights of parameters ``[first, end)``, which are on the device."""
        with torch.no_grad():
            self._shard[self._offsets[first] : self._offsets[end]].copy_(run)

    def renew(self) -> None:
        """Master weights changed: use them."""
        if self._master is not self._shard:
            self.take_master(self._master, 0, len(self.layouts))

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        self.gradient = self._accumulated = None
        for parameter in self.parameters.values():
            parameter.grad = None

    def sum_of_squares(self, *, only_tensor_sharded: bool) -> Tensor:
        """Of the gradient, in float64; on request without what other ranks of the tensor axis hold
        too.
        """
        assert self.gradient is not None
        start = 0
        if only_tensor_sharded:
            start = self._numel_where(lambda layout: not layout.tensor_state.is_sharded)
        return sum_of_squares(self.gradient[start:])

    def accumulate(self, layout: ParameterLayout, index: int, tensor: Tensor) -> None:
        """Move the gradient that autograd left at ``tensor`` into the accumulation buffer."""
        gradient, tensor.grad = tensor.grad, None
        assert gradient is not None
        if self.held is not None:
            before = self.held.get((self, index))
            self.held[self, index] = gradient if before is None else before + gradient
            return
        if self._accumulated is None:
            self._accumulated = self._zeros()
        chunks = self._accumulated.view(self._num_shards, self._shard_numel)
        layout.add_to_chunks(self._columns(chunks, index), gradient)

    def put_back(self, index: int, gradient: Tensor) -> None:
        """Leave a gradient that was held at its parameter, as autograd does, for more to be added
        or for ``accumulate_left``.
        """
        self.tensors[self.layouts[index].name].grad = gradient

    def accumulate_left(self, index: int) -> None:
        """Accumulate what was put back, unless autograd came to the parameter meanwhile."""
        layout = self.layouts[index]
        tensor = self.tensors[layout.name]
        if tensor.grad is not None:
            self.accumulate(layout, index, tensor)

    def _take_accumulated(self) -> Tensor:
        accumulated, self._accumulated = self._accumulated, None
        if self._is_partial and not self._counts:
            return self._zeros()
        return self._zeros() if accumulated is None else accumulated

    def _zeros(self) -> Tensor:
        numel = self._num_shards * self._shard_numel
        return torch.zeros(numel, dtype=self._gradient_dtype, device=self._device)

    def _make_buffer(self, device: torch.device) -> Tensor:
        """Where the gathered parameters lie."""
        if self._is_stored_whole:
            return self._shard
        starts = _offsets([layout.chunk_numel * self._num_shards for layout in self.layouts])
        return torch.empty(starts[-1], dtype=self._dtype, device=device)

    def _make_tensors(self) -> dict[str, Tensor]:
        """Leaves of autograd in the buffer, whose gradients are accumulated as they come."""
        tensors: dict[str, Tensor] = {}
        for index, layout in enumerate(self.layouts):
            tensor = self._buffer_view(index).detach().view(layout.local_shape)
            if self.trainable:
                tensor.requires_grad_()
                tensor.register_post_accumulate_grad_hook(_Accumulate(self, layout, index))
            tensors[layout.name] = tensor
        return tensors

    def _buffer_view(self, index: int) -> Tensor:
        layout = self.layouts[index]
        start = self._offsets[index] * self._num_shards
        view = self._buffer[start : start + layout.local_shape[0] * layout.row_numel]
        return view.view(layout.local_shape)

    def _shard_view(self, flat: Tensor, index: int, before: int = 0) -> Tensor:
        layout, start = self.layouts[index], self._offsets[index] - before
        num_rows = layout.shard_shape[0]
        return flat[start : start + num_rows * layout.row_numel].view(layout.shard_shape)

    def _columns(self, chunks: Tensor, index: int) -> Tensor:
        return chunks[:, self._offsets[index] : self._offsets[index + 1]]

    def _numel_where(self, predicate: Callable[[ParameterLayout], bool]) -> int:
        """Length of the leading part of a shard buffer whose parameters fulfil ``predicate``."""
        return sum(layout.chunk_numel for layout in self.layouts if predicate(layout))


HeldGradients = dict[tuple[ParameterUnit, int], Tensor]
"""Gradients that are not accumulated yet, by unit and parameter."""


@dataclass(frozen=True, slots=True)
class _Accumulate:
    unit: ParameterUnit
    layout: ParameterLayout
    index: int

    def __call__(self, tensor: Tensor) -> None:
        self.unit.accumulate(self.layout, self.index, tensor)


def _offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Starts of parts of these sizes, and the end of the last."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    return tuple(offsets)


_CACHED_NUMEL, _DEVICE_NUMEL = 2**16, 2**22
"""Elements that are widened to float64 at a time: what stays in a CPU's caches, and few kernels."""


def sum_of_squares(values: Tensor) -> Tensor:
    """In float64 throughout: an fp32 norm of many millions of elements is off by parts in 1e3."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    numel = _CACHED_NUMEL if values.device.type == "cpu" else _DEVICE_NUMEL
    for chunk in values.split(numel):
        total += torch.linalg.vector_norm(chunk, dtype=torch.float64).square()
    return total
