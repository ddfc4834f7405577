"""Run a block of which some nodes are computed again in backward.

Autograd saves tensors through hooks. What is the result of a recomputed node, a view of one, or
inside one, is not held: a *handle* is saved in its place. The first handle that backward asks for
computes those nodes again, once for all handles; what it finds is held as long as its handle, which
autograd lets go after the op that needed it, and what is computed on the way until it is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

Context = Callable[[], AbstractContextManager[Any]]
"""Makes what surrounds the block's ops, forward and when they are computed again."""


class RecomputingBlock:
    """Computes what ``module`` does.

    Args:
        module: Its graph is pure; it has no submodules.
        recomputed: Nodes of its graph of which nothing is kept. See ``autopar.ir.recompute``.
        in_parts: Whether backward leaves gradients of weights for later.
    """

    def __init__(
        self, module: fx.GraphModule, recomputed: frozenset[fx.Node], *, in_parts: bool = False
    ) -> None:
        self.module, self.in_parts = module, in_parts
        self.recomputed = recomputed
        self.nodes = tuple(module.graph.nodes)
        self._dying = _last_reads(self.nodes)

    def __call__(self, *arguments: Tensor, context: Context) -> tuple[Tensor, ...]:
        """The block's results."""
        tape = _Tape(self, context)
        given = iter(arguments)
        values: dict[fx.Node, Any] = {}
        *before, output = self.nodes
        with context(), saved_tensors_hooks(tape.pack, tape.unpack):
            for node in before:
                if node.op == "placeholder":
                    values[node] = next(given)
                else:
                    tape.running = node if node in self.recomputed else None
                    values[node] = self.run_node(node, values)
                    tape.running = None
                tape.record(node, values)
                for operand in self._dying.get(node, ()):
                    del values[operand]
        tape.end_forward()
        return tuple(fx.map_arg(output.args[0], values.__getitem__))

    def run_node(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """The value of a call, or of an attribute of the module."""
        if node.op == "get_attr":
            return getattr(self.module, str(node.target))
        assert node.op == "call_function"
        assert callable(node.target)
        args = fx.map_arg(node.args, values.__getitem__)
        kwargs = fx.map_arg(node.kwargs, values.__getitem__)
        return node.target(*args, **kwargs)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Handle:
    """Stands for a tensor that is computed again.

    ``is_result``: the tensor views tensor ``number`` of the result of ``node``, as ``view`` says
    (size, stride, offset). Otherwise it is the ``number``-th that autograd saved when ``node`` ran.
    """

    tape: _Tape
    node: fx.Node
    is_result: bool
    number: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] = ((), (), 0)


@dataclass(frozen=True, slots=True)
class _Owner:
    """Who made a storage: tensor ``number`` of the result of a recomputed node, or another
    (None).
    """

    node: fx.Node | None
    number: int
    dtype: torch.dtype
    alive: StorageWeakRef = field(repr=False)  # while it is held no other storage gets this key


class _Tape:
    """What one run of a block keeps."""

    def __init__(self, block: RecomputingBlock, context: Context) -> None:
        self.running: fx.Node | None = None
        self._block, self._context = block, context
        self._again = set(block.recomputed)
        self._owners: dict[int, _Owner] = {}
        self._num_saved: Counter[fx.Node] = Counter()
        self._handles: WeakSet[_Handle] = WeakSet()
        self._kept: dict[fx.Node, Any] = {}
        self._replayed: tuple[fx.Node, ...] = ()
        self._found: WeakKeyDictionary[_Handle, Tensor] = WeakKeyDictionary()

    def record(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> None:
        """Note who made the storages of a node's value, and keep what recomputing it reads."""
        tensors = list(_tensors(values[node]))
        for number, tensor in enumerate(tensors):
            owner = self._owners.get(_storage(tensor))
            if owner is None:
                maker = node if node in self._again else None
                alive = StorageWeakRef(tensor.untyped_storage())
                self._owners[_storage(tensor)] = _Owner(maker, number, tensor.dtype, alive)
            elif owner.node is not None:
                self._again.add(node)  # a view of what is not kept
        if node in self._again:
            for operand in node.all_input_nodes:
                if operand not in self._again and operand not in self._kept:
                    self._kept[operand] = pytree.tree_map_only(Tensor, _leaf, values[operand])

    def pack(self, tensor: Tensor) -> Tensor | _Handle:
        """What is held in place of a tensor that autograd saves in forward."""
        number = self._count()
        owner = self._owners.get(_storage(tensor))
        handle: _Handle | None = None
        if owner is None:
            if self.running is not None:
                handle = _Handle(self, self.running, False, number)
        elif owner.node is not None and _can_view(tensor, owner.dtype):
            view = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
            handle = _Handle(self, owner.node, True, owner.number, view)
        if handle is None:
            return tensor
        self._handles.add(handle)
        return handle

    def _count(self) -> int:
        """How many tensors were saved before this one while the same node ran."""
        if self.running is None:
            return 0
        self._num_saved[self.running] += 1
        return self._num_saved[self.running] - 1

    def unpack(self, saved: Tensor | _Handle) -> Tensor:
        """The tensor that autograd saved."""
        if isinstance(saved, Tensor):
            return saved
        if saved not in self._found:
            self._recompute()
        return self._found[saved]

    def end_forward(self) -> None:
        """Let go of what backward will not need."""
        needed: set[fx.Node] = set()
        todo = [handle.node for handle in self._handles]
        while todo:
            node = todo.pop()
            if node not in needed:
                needed.add(node)
                todo.extend(self._again.intersection(node.all_input_nodes))
        read = {operand for node in needed for operand in node.all_input_nodes}
        self._replayed = tuple(node for node in self._block.nodes if node in needed)
        self._kept = {node: value for node, value in self._kept.items() if node in read}
        self._owners.clear()

    def _recompute(self) -> None:
        """Find the tensors of all handles that are alive."""
        wanted: dict[fx.Node, list[_Handle]] = {}
        for handle in self._handles:
            wanted.setdefault(handle.node, []).append(handle)
        values = dict(self._kept)
        if self._block.in_parts:  # handles live on, but nothing has to be found twice
            self._kept = {}
        dying = _last_reads(self._replayed)
        saved: list[Tensor] = []
        with (
            torch.enable_grad(),
            self._context(),
            saved_tensors_hooks(saved.append, _never_unpacked),
        ):
            for node in self._replayed:
                saved.clear()
                values[node] = self._block.run_node(node, values)
                handles = wanted.get(node, ())
                assert len(saved) == self._num_saved[node] or node not in self._block.recomputed
                results = list(_tensors(values[node])) if handles else []
                for handle in handles:
                    self._found[handle] = (
                        results[handle.number].detach().as_strided(*handle.view)
                        if handle.is_result
                        else saved[handle.number]
                    )
                for operand in dying.get(node, ()):
                    del values[operand]
        saved.clear()  # the hook that fills it lives as long as the graph that was recorded


def _last_reads(nodes: Iterable[fx.Node]) -> Mapping[fx.Node, list[fx.Node]]:
    """For each of ``nodes``, in their order, what is read for the last time by it."""
    last = {operand: node for node in nodes for operand in node.all_input_nodes}
    found: dict[fx.Node, list[fx.Node]] = {}
    for operand, node in last.items():
        found.setdefault(node, []).append(operand)
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> int:
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)


def _leaf(tensor: Tensor) -> Tensor:
    """``tensor`` outside of autograd's graph, but as differentiable."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _can_view(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype is dtype and not tensor.is_conj() and not tensor.is_neg()


def _never_unpacked(saved: Any) -> Tensor:
    raise AssertionError("nobody runs backward through what is computed again")
