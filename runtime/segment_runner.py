"""Run a segment forward: its blocks in order, recomputed in backward where the plan says so."""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from autopar.ir.graph import ModelGraph, info
from autopar.ir.kernels import parse_kernels
from autopar.ir.plan import SchedulePlan
from autopar.ir.program import Segment
from autopar.ir.random_ops import FORMS
from autopar.ir.randomness import Drawing, drawing
from autopar.ir.recompute import recomputed_blocks, recomputed_nodes
from autopar.runtime.node_recompute import Context, RecomputingBlock


class SegmentRunner:
    """Runs one segment.

    Args:
        segment: With the rank's axis groups bound.
        model: The captured model.
        schedule: Says what is computed again in backward (``autopar.ir.recompute``).
    """

    def __init__(self, segment: Segment, model: ModelGraph, schedule: SchedulePlan) -> None:
        self.segment = segment
        self._interpreter = _BlockInterpreter(segment.module)
        loss_block = model.producer(model.loss)[0]
        whole = recomputed_blocks(model, schedule.recompute, schedule.recomputed_blocks)
        by_nodes = _by_nodes(segment, schedule)
        calls = [node for node in segment.module.graph.nodes if node.op == "call_module"]
        for node, block in zip(calls, segment.blocks, strict=True):
            self._interpreter.blocks[node.name] = _BlockCall(
                index=block,
                draws=_draws(segment.module.get_submodule(str(node.target))),
                is_recomputed=block in whole,
                by_nodes=by_nodes[str(node.target)] if block != loss_block else None,
            )

    def __call__(self, arguments: Sequence[Tensor], numbers: Drawing) -> tuple[Tensor, ...]:
        """The segment's results.

        Args:
            arguments: In the segment's order.
            numbers: What its blocks draw; the block is filled in here.
        """
        self._interpreter.numbers = numbers
        made = tuple(self._interpreter.run(*arguments))
        self._interpreter.env = {}  # it would hold the results until the next run
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockCall:
    """How a block of the segment is run: whether it ``draws`` random numbers, and whether it is
    computed again in backward as a whole, or ``by_nodes``.
    """

    index: int
    draws: bool
    is_recomputed: bool
    by_nodes: RecomputingBlock | None


def _by_nodes(segment: Segment, schedule: SchedulePlan) -> dict[str, RecomputingBlock | None]:
    """For each kind of the segment, what runs it where some of its nodes are recomputed."""
    found: dict[str, RecomputingBlock | None] = {}
    for name, module in segment.module.named_children():
        assert isinstance(module, fx.GraphModule)
        attention = parse_kernels(schedule.kernels).attention
        nodes = recomputed_nodes(module.graph, schedule.recompute, attention)
        found[name] = RecomputingBlock(module, nodes) if nodes else None
    return found


def _draws(module: nn.Module) -> bool:
    assert isinstance(module, fx.GraphModule)
    return any(node.target in FORMS for node in module.graph.nodes if node.op == "call_function")


class _BlockInterpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.blocks: dict[str, _BlockCall] = {}
        self.numbers: Drawing | None = None
        self._next: _BlockCall | None = None

    def run_node(self, n: fx.Node) -> Any:
        self._next = self.blocks.get(n.name)
        return super().run_node(n)

    def call_module(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        run: Callable[..., Any] = self.fetch_attr(target)
        block = self._next
        assert block is not None
        context: Context = contextlib.nullcontext
        if block.draws:
            assert self.numbers is not None
            context = partial(drawing, replace(self.numbers, block=block.index))
        if block.by_nodes is not None and torch.is_grad_enabled():
            return block.by_nodes(*args, context=context)
        run = partial(_run_in, context, run)
        if block.is_recomputed and torch.is_grad_enabled():
            # numbers are drawn by position: there is no state of a generator to bring back
            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return run(*args, **kwargs)


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
