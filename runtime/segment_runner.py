"""Run a segment forward: its blocks in order, recomputed in backward where the plan says so."""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from autopar.ir.deferral import Apart, Deferred, InsideApart, deferring
from autopar.ir.graph import BlockKind, ModelGraph, info
from autopar.ir.kernels import parse_kernels
from autopar.ir.plan import SchedulePlan
from autopar.ir.program import Segment
from autopar.ir.random_ops import FORMS
from autopar.ir.randomness import Drawing, drawing
from autopar.ir.recompute import (
    blocks_by_op,
    gathering_nodes,
    recomputed_blocks,
    recomputed_nodes,
)
from autopar.runtime.node_recompute import Context, RecomputingBlock
from autopar.runtime.weight_parts import weights_apart


class SegmentRunner:
    """Runs one segment.

    Args:
        segment: With the rank's axis groups bound.
        model: The captured model.
        schedule: Says what is computed again in backward (``autopar.ir.recompute``).
        in_parts: Whether backward leaves gradients of weights for later
            (``autopar.ir.weight_parts``).
    """

    def __init__(
        self,
        segment: Segment,
        model: ModelGraph,
        schedule: SchedulePlan,
        *,
        in_parts: bool = False,
    ) -> None:
        self.segment = segment
        self._interpreter = _BlockInterpreter(segment.module)
        loss_block = model.producer(model.loss)[0]
        whole = recomputed_blocks(model, schedule.recompute, schedule.recomputed_blocks)
        by_op = blocks_by_op(model, schedule.recompute, schedule.recomputed_by_op)
        gathered = frozenset(schedule.gathered_again)
        calls = [node for node in segment.module.graph.nodes if node.op == "call_module"]
        forms: dict[tuple[str, bool], _BlockForm] = {}
        for node, block in zip(calls, segment.blocks, strict=True):
            key = kind, makes_loss = str(node.target), block == loss_block
            if key not in forms:
                module = segment.module.get_submodule(kind)
                assert isinstance(module, fx.GraphModule)
                forms[key] = _form(
                    module, model.kinds[kind], schedule, makes_loss=makes_loss, in_parts=in_parts
                )
            self._interpreter.blocks[node.name] = _BlockCall(
                index=block,
                form=forms[key],
                is_recomputed=block in whole,
                again=(block in by_op, block in gathered),
            )

    @property
    def leaves_weights(self) -> bool:
        """Whether backward leaves gradients of some weights for later."""
        return any(call.form.leaves_weights for call in self._interpreter.blocks.values())

    def __call__(
        self, arguments: Sequence[Tensor], numbers: Drawing, deferred: Deferred | None = None
    ) -> tuple[Tensor, ...]:
        """The segment's results.

        Args:
            arguments: In the segment's order.
            numbers: What its blocks draw; the block is filled in here.
            deferred: Takes what backward leaves for later.
        """
        self._interpreter.numbers, self._interpreter.deferred = numbers, deferred
        made = tuple(self._interpreter.run(*arguments))
        self._interpreter.env = {}  # it would hold the results until the next run
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockForm:
    """How the blocks of a kind are run.

    Attributes:
        module: Their graph.
        draws: Whether it draws random numbers.
        parts: Runs it where backward does some of its nodes again: by whether these are ops, and
            whether gathers; none where there are no such nodes.
        whole: Runs it where backward computes all of it again, and leaves gradients of weights for
            later. ``torch.utils.checkpoint`` would do it again for every op that is taken apart.
        in_parts: Whether backward leaves gradients of weights for later.
    """

    module: fx.GraphModule
    draws: bool
    parts: Mapping[tuple[bool, bool], RecomputingBlock]
    whole: RecomputingBlock | None
    in_parts: bool

    @property
    def leaves_weights(self) -> bool:
        """Whether any of its ops is taken apart."""
        return self.in_parts and any(
            isinstance(node.target, Apart | InsideApart) for node in self.module.graph.nodes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockCall:
    """A block of the segment: whether it is computed again in backward as a whole, or some of its
    ops, or its gathers.
    """

    index: int
    form: _BlockForm
    is_recomputed: bool
    again: tuple[bool, bool]

    @property
    def recomputing(self) -> RecomputingBlock | None:
        """What runs it node by node, if anything does."""
        if self.is_recomputed:
            return self.form.whole
        return self.form.parts.get(self.again)


def _form(
    module: fx.GraphModule,
    kind: BlockKind,
    schedule: SchedulePlan,
    *,
    makes_loss: bool,
    in_parts: bool,
) -> _BlockForm:
    """The block that makes the loss has its backward at once: in one part, and nothing of it is
    computed again.
    """
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    draws = any(node.target in FORMS for node in calls)
    in_parts = in_parts and not makes_loss
    if in_parts:
        module = weights_apart(module, kind.roles)
        calls = [node for node in module.graph.nodes if node.op == "call_function"]
    attention = parse_kernels(schedule.kernels).attention
    ops = recomputed_nodes(module.graph, schedule.recompute, attention)
    gathers = gathering_nodes(module.graph)
    nodes = {(True, False): ops, (False, True): gathers, (True, True): ops | gathers}
    return _BlockForm(
        module=module,
        draws=draws,
        parts={
            again: RecomputingBlock(module, own, in_parts=in_parts)
            for again, own in nodes.items()
            if own and not makes_loss
        },
        whole=RecomputingBlock(module, frozenset(calls), in_parts=True) if in_parts else None,
        in_parts=in_parts,
    )


class _BlockInterpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.blocks: dict[str, _BlockCall] = {}
        self.numbers: Drawing | None = None
        self.deferred: Deferred | None = None
        self._next: _BlockCall | None = None

    def run_node(self, n: fx.Node) -> Any:
        self._next = self.blocks.get(n.name)
        return super().run_node(n)

    def call_module(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        block = self._next
        assert block is not None
        form = block.form
        numbers = None
        if form.draws:
            assert self.numbers is not None
            numbers = replace(self.numbers, block=block.index)
        context: Context = contextlib.nullcontext
        if form.draws or form.in_parts:
            context = partial(_surrounding, numbers, self.deferred if form.in_parts else None)
        run = partial(_run_in, context, form.module)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        recomputing = block.recomputing
        if recomputing is not None:
            return recomputing(*args, context=context)
        if block.is_recomputed:
            # numbers are drawn by position: there is no state of a generator to bring back
            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return run(*args, **kwargs)


@contextlib.contextmanager
def _surrounding(numbers: Drawing | None, deferred: Deferred | None) -> Iterator[None]:
    """What a block draws by, and what takes the gradients that come later."""
    draws = contextlib.nullcontext() if numbers is None else drawing(numbers)
    with draws, deferring(deferred):
        yield


def _run_in(context: Context, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Recomputing calls this again, in whatever thread autograd does it."""
    with context():
        return run(*args, **kwargs)


def failing_op(traceback: TracebackType | None) -> str | None:
    """The op, module and source line at which generated code of a graph module failed, or None."""
    found: str | None = None
    while traceback is not None:
        frame = traceback.tb_frame
        module = frame.f_locals.get("self")
        if isinstance(module, fx.GraphModule):
            line = linecache.getline(frame.f_code.co_filename, traceback.tb_lineno)
            found = _describe(module, line.partition("=")[0].strip()) or found
        elif isinstance(module, RecomputingBlock) and "node" in frame.f_locals:
            found = _describe(module.module, frame.f_locals["node"].name) or found
        traceback = traceback.tb_next
    return found


def _describe(module: fx.GraphModule, assigned: str) -> str | None:
    for node in module.graph.nodes:
        if node.name != assigned.partition(":")[0].strip():
            continue
        try:
            where = info(node)
        except KeyError:  # a segment's own graph: its nodes are calls of blocks
            return node.name
        parts = [f"{node.name} ({node.target})", where.module, where.source]
        return ", ".join(part for part in parts if part)
    return None
