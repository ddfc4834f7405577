"""Costs of options, moves and states on one rank, for the problem of an axis."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.ir.families import Family, family_of
from autopar.ir.graph import TensorInfo
from autopar.ir.moves import Collective, backward_of, collective_of
from autopar.ir.placement import INVARIANT, State
from autopar.ir.rules.core import Option
from autopar.solver.costs.comm import Group, Links
from autopar.solver.costs.fusion import PLAIN, NodeStyle
from autopar.solver.costs.kernels import Kernels
from autopar.solver.costs.work import Work, backward_work, forward_work, weight_work
from autopar.solver.layout.outer import NodeView, causal_imbalance
from autopar.solver.layout.problem import MoveCost

Shape = tuple[int, ...]

_FEW_RUNS = 16
"""Shards of so few contiguous runs are sent from and received in place, in one call."""


_ALL_PLAIN: Mapping[fx.Node, NodeStyle] = {}


@dataclass(frozen=True, slots=True)
class OpSeconds:
    """Seconds of an op under an option, and of the collectives inside its local form."""

    forward_s: float
    backward_s: float
    forward_comm_s: float
    backward_comm_s: float
    forward_launch_s: float
    backward_launch_s: float


@dataclass(frozen=True, slots=True)
class Coster:
    """Costs on an axis whose ranks are ``group``, at ``batch`` sequences per rank of outer axes.

    ``styles`` say by which kernels nodes are computed; ``again`` are those that backward computes
    again, each by itself: what they cost then is in ``by_op``. With ``gathers_again`` what the
    ranks gather from shards is not kept, and gathered again.
    """

    kernels: Kernels
    links: Links
    group: Group
    batch: int
    reduce_itemsize: int = 4
    styles: Mapping[fx.Node, NodeStyle] = field(default_factory=lambda: _ALL_PLAIN, repr=False)
    again: frozenset[fx.Node] = field(default=frozenset(), repr=False)
    gathers_again: bool = False
    _shapes: dict[int, tuple[TensorInfo, Shape]] = field(default_factory=dict, repr=False)

    @property
    def fingerprint(self) -> Hashable:
        """Equal for costers that cost the same, but for ``styles`` and what is done again."""
        by = type(self.kernels), type(self.links), self.links.cluster
        return by, self.group, self.batch, self.reduce_itemsize

    def style(self, node: fx.Node) -> NodeStyle:
        """By which kernels ``node`` is computed."""
        return self.styles.get(node, PLAIN)

    def shape(self, tensor: TensorInfo, state: State) -> Shape:
        """Shape on a rank."""
        found = self._shapes.get(id(tensor))  # evaluating sympy thousands of times takes seconds
        if found is None:
            found = self._shapes[id(tensor)] = (tensor, tensor.shape_at(self.batch))
        shape = found[1]
        if not state.is_sharded or self.group.size == 1:
            return shape
        size = -(-shape[state.dim] // self.group.size)
        return (*shape[: state.dim], size, *shape[state.dim + 1 :])

    def numel(self, tensor: TensorInfo, state: State) -> int:
        """Elements on a rank."""
        total = 1
        for size in self.shape(tensor, state):
            total *= size
        return total

    def bytes(self, tensor: TensorInfo, state: State) -> int:
        """Bytes on a rank."""
        return self.numel(tensor, state) * tensor.dtype.itemsize

    def op(self, node: fx.Node, view: NodeView, option: Option) -> OpSeconds:
        """Seconds of a node under an option."""
        operands = self.operand_shapes(view, option)
        results = [self.shape(t, s) for t, s in zip(view.results, option.results, strict=True)]
        comm = self.helper_seconds(option, view.operands)
        dispatch = self.dispatch(view, option)
        style = self.style(node)
        works = (
            forward_work(node, operands, results, dispatch=dispatch, style=style),
            backward_work(node, operands, results, dispatch=dispatch, style=style),
        )
        forward = self.kernels.seconds(works[0])
        backward = self.kernels.seconds(works[1], backward=True)
        launches = [work.num_kernels * self.kernels.hardware.chip.launch_s for work in works]
        factor = view.imbalance
        if option.helper is not None:
            factor *= causal_imbalance(node, option.results[0], self.group.size)
        return OpSeconds(factor * forward + comm[0], factor * backward + comm[1], *comm, *launches)

    def weight_seconds(
        self, node: fx.Node, view: NodeView, option: Option, weights: Sequence[int]
    ) -> float:
        """Seconds of the part of a product's backward that gives the gradients of ``weights``."""
        operands = self.operand_shapes(view, option)
        results = [self.shape(t, s) for t, s in zip(view.results, option.results, strict=True)]
        dispatch = self.dispatch(view, option)
        work = weight_work(node, operands, results, weights, dispatch=dispatch)
        return view.imbalance * self.kernels.seconds(work, backward=True)

    def operand_shapes(self, view: NodeView, option: Option) -> list[Shape]:
        """Shapes of a node's operands on a rank."""
        return [self.shape(t, s) for t, s in zip(view.operands, option.operands, strict=True)]

    def dispatch(self, view: NodeView, option: Option) -> int:
        """Ranks that send each other the tokens of their experts."""
        return view.dispatch * (self.group.size if option.helper == "expert_dispatch" else 1)

    def transient_bytes(self, node: fx.Node, view: NodeView, option: Option) -> int:
        """Operands and results, as the backward of the op has their gradients beside what is kept.

        A loss has the logits twice more, in fp32: as they are and as their gradient.
        """
        pairs = [
            *zip(view.operands, option.operands, strict=True),
            *zip(view.results, option.results, strict=True),
        ]
        total = sum(self.bytes(t, s) for t, s in pairs if t.requires_grad)
        if family_of(node) is Family.LOSS:
            total += 2 * self.bytes(*pairs[0])
        return total

    def move(self, tensor: TensorInfo, source: State, target: State) -> MoveCost:
        """Seconds of ``source → target`` in a micro-batch, forward and backward."""
        forward = self._transfer(tensor, source, target)
        backward = 0.0
        if tensor.requires_grad:
            backward = self._transfer(tensor, *backward_of(source, target))
        return MoveCost(forward, backward)

    def _transfer(self, tensor: TensorInfo, source: State, target: State) -> float:
        if self.group.size == 1 or source == target or (source.is_whole and target.is_whole):
            return 0.0
        whole = self.bytes(tensor, source if not source.is_sharded else target)
        if source.is_sharded and target.is_sharded:
            whole = self.bytes(tensor, source) * self.group.size
        if not tensor.requires_grad and source.is_whole and target.is_sharded:
            return 0.0  # inputs and constants: sliced once, or as they are read
        collective = collective_of(source, target)
        seconds = self.links.seconds(collective, whole, self.group)
        sharded = source if source.is_sharded else target
        runs = len(sharded.blocks) if sharded.is_sharded else 1
        runs *= math.prod(self.shape(tensor, INVARIANT)[: sharded.dim]) if sharded.is_sharded else 1
        if runs <= _FEW_RUNS and collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
            return seconds
        return seconds + self._copy_seconds(whole, source, target, collective)

    def _copy_seconds(self, whole: int, source: State, target: State, done: Collective) -> float:
        """Slices, pads and stacks are kernels, too: what they read and write."""
        part = whole / self.group.size
        if done is Collective.ALL_REDUCE:
            copied = 0.0
        elif done is Collective.ALL_GATHER:
            copied = 2.0 * whole
        elif done is Collective.REDUCE_SCATTER:
            copied = 2.0 * whole if target.dim > 0 or len(target.blocks) > 1 else 0.0
        elif done is Collective.ALL_TO_ALL or (source.is_whole and target.is_sharded):
            copied = 4.0 * part if done is Collective.ALL_TO_ALL else 2.0 * part
        else:
            copied = float(whole)
        return self.kernels.seconds(Work(bytes=math.ceil(copied), num_kernels=1))

    def helper_seconds(self, option: Option, tensors: Sequence[TensorInfo]) -> tuple[float, float]:
        """Seconds of the collectives of an option's helper, forward and backward."""
        if not option.helper:
            return 0.0, 0.0
        operands = [self.shape(t, s) for t, s in zip(tensors, option.operands, strict=True)]
        tokens = math.prod(operands[0][:-1])
        if option.helper == "vocab_token_loss":
            reduce = Collective.ALL_REDUCE
            sums = self.links.seconds(reduce, 4 * tokens, self.group)
            return sums + self.links.seconds(reduce, 8 * tokens, self.group), 0.0
        if option.helper == "expert_dispatch":  # to the experts and back
            chosen = operands[1][-1]
            row = operands[0][-1] * tensors[0].dtype.itemsize
            whole = tokens * chosen * row * self.group.size
            once = self.links.seconds(Collective.ALL_TO_ALL, whole, self.group)
            return 2 * once, 2 * once
        return 0.0, 0.0

    def parameter_step_seconds(self, tensor: TensorInfo, state: State) -> float:
        """Reduction of a parameter's gradient over the axis, once a step: all-reduce of ``R``."""
        if not tensor.requires_grad or not state.is_whole or str(state) == "I":
            return 0.0
        num_bytes = self.numel(tensor, state) * self.reduce_itemsize
        return self.links.seconds(Collective.ALL_REDUCE, num_bytes, self.group)
