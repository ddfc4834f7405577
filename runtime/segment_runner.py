"""Run a segment forward: its blocks in order, recomputed in backward where the plan says so."""

from __future__ import annotations

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
from autopar.ir.program import Segment
from autopar.ir.random_ops import FORMS
from autopar.ir.randomness import Drawing, drawing


class SegmentRunner:
    """Runs one segment.

    Args:
        segment: With the rank's axis groups bound.
        model: The captured model.
        recompute: Keep only what passes between blocks, and compute each block again in backward.
            The block that makes the loss is not recomputed: its backward follows at once.
    """

    def __init__(self, segment: Segment, model: ModelGraph, *, recompute: bool) -> None:
        self.segment = segment
        self._interpreter = _BlockInterpreter(segment.module)
        loss_block = model.producer(model.loss)[0]
        calls = [node for node in segment.module.graph.nodes if node.op == "call_module"]
        for node, block in zip(calls, segment.blocks, strict=True):
            self._interpreter.blocks[node.name] = _BlockCall(
                index=block,
                draws=_draws(segment.module.get_submodule(str(node.target))),
                recomputes=recompute and block != loss_block,
            )

    def __call__(self, arguments: Sequence[Tensor], numbers: Drawing) -> tuple[Tensor, ...]:
        """The segment's results.

        Args:
            arguments: In the segment's order.
            numbers: What its blocks draw; the block is filled in here.
        """
        self._interpreter.numbers = numbers
        return tuple(self._interpreter.run(*arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockCall:
    """How a block of the segment is run: ``draws`` random numbers or not, ``recomputes`` it in
    backward or not.
    """

    index: int
    draws: bool
    recomputes: bool


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
        if block.draws:
            assert self.numbers is not None
            run = partial(_run_drawing, run, replace(self.numbers, block=block.index))
        if block.recomputes and torch.is_grad_enabled():
            # numbers are drawn by position: there is no state of a generator to bring back
            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return run(*args, **kwargs)


def _run_drawing(run: Callable[..., Any], numbers: Drawing, *args: Any, **kwargs: Any) -> Any:
    """Recomputing calls this again, in whatever thread autograd does it."""
    with drawing(numbers):
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
