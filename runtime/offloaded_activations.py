"""What a forward keeps for its backward, in the host's memory meanwhile.

While the forward runs, autograd saves tensors through hooks: their storages are put on a *shelf*,
each once, whatever views of it are saved, and autograd gets *handles* in their place. The shelf
goes to the host and comes back; then handles give the same views of what came back, and each
storage lives as long as a handle of it: until the op that saved it is done. Storages that the
forward was given are left where they are: parameters, constants, inputs and activations live on
anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime.host_copies import Copy, HostCopies


class Shelf:
    """What one forward of a segment keeps.

    Args:
        given: What the forward reads that was made elsewhere.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        self._given = {_storage(tensor) for tensor in given}
        self._items: dict[tuple[int, torch.dtype], _Item] = {}
        self._home: tuple[Tensor, ...] = ()  # on the host
        self._out: Copy | None = None
        self._back: Copy | None = None

    def hooks(self) -> saved_tensors_hooks:
        """The context in which the forward runs."""
        return saved_tensors_hooks(self._pack, _unpack)

    @property
    def num_bytes(self) -> int:
        """Of all that is on the shelf, here or on the host."""
        return sum(tensor.nbytes for tensor in self._home or self._here())

    def offload(self, copies: HostCopies) -> None:
        """Start to copy all to the host. What is here stays until ``release``."""
        self._given = set()
        here = self._here()
        self._home = tuple(copies.empty(flat.shape, flat.dtype) for flat in here)
        self._out = copies.send(here, self._home)

    def release(self) -> None:
        """Let go of what is here, once it is on the host. What is computed from now on comes after
        that, so that it can have the memory.
        """
        assert self._out is not None
        self._out.wait()
        for item in self._items.values():
            item.flat = None

    def fetch(self, copies: HostCopies) -> None:
        """Start to bring all back, once it is on the host."""
        assert self._out is not None
        self._back = copies.bring_in_order(self._home, after=self._out)

    def wait(self) -> None:
        """Let what is computed from now on find all here, and autograd's handles alone hold it."""
        assert self._back is not None
        self._back.wait()
        for item, tensor in zip(self._items.values(), self._back.tensors, strict=True):
            item.flat = tensor
        self._items, self._home, self._out, self._back = {}, (), None, None

    def _here(self) -> list[Tensor]:
        return [item.flat for item in self._items.values() if item.flat is not None]

    def _pack(self, tensor: Tensor) -> Tensor | _Handle:
        if _storage(tensor) in self._given or tensor.is_conj() or tensor.is_neg():
            return tensor
        key = _storage(tensor), tensor.dtype
        item = self._items.get(key)
        if item is None:
            numel = tensor.untyped_storage().nbytes() // tensor.itemsize
            item = self._items[key] = _Item(tensor.detach().as_strided((numel,), (1,), 0))
        view = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return _Handle(item=item, view=view)


@dataclass(slots=True, eq=False)
class _Item:
    """A whole storage, or None while it is on the host only."""

    flat: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Handle:
    """A view (size, stride, offset) of a storage on a shelf."""

    item: _Item
    view: tuple[tuple[int, ...], tuple[int, ...], int]


def _unpack(saved: Tensor | _Handle) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    assert saved.item.flat is not None
    return saved.item.flat.as_strided(*saved.view)


class OffloadedActivations:
    """The shelves of a step of one rank, by segment and micro-batch: what the executor calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shelves: dict[tuple[int, int], Shelf] = {}
        self._leaving: Shelf | None = None

    @functools.cached_property
    def _copies(self) -> HostCopies:
        return HostCopies(self._device)

    def clear(self) -> None:
        """Forget all of a step."""
        self._shelves, self._leaving = {}, None

    def shelf(self, cell: tuple[int, int], given: Iterable[Tensor]) -> Shelf:
        """For what a forward is about to keep."""
        found = self._shelves[cell] = Shelf(given)
        return found

    def offload(self, cell: tuple[int, int]) -> None:
        """Start to copy what a forward kept to the host, once the copy before is done."""
        self._let_go()
        self._leaving = self._shelves[cell]
        self._leaving.offload(self._copies)

    def fetch(self, cell: tuple[int, int]) -> None:
        """Start to bring it back."""
        self._shelves[cell].fetch(self._copies)

    def wait(self, cell: tuple[int, int]) -> None:
        """Let the backward that comes now find it; afterwards autograd alone knows of it."""
        shelf = self._shelves.pop(cell, None)
        if shelf is None:
            return
        if shelf is self._leaving:  # it came back after it had left
            self._leaving = None
        shelf.wait()

    def _let_go(self) -> None:
        if self._leaving is not None:
            self._leaving.release()
            self._leaving = None


def _storage(tensor: Tensor) -> int:
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)
