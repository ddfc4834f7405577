"""Run a segment forward: its blocks in order, recomputed in backward where the plan says so."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from autopar.ir.graph import ModelGraph, info
from autopar.ir.program import Segment


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
        if recompute:
            loss_block = model.producer(model.loss)[0]
            calls = [node for node in segment.module.graph.nodes if node.op == "call_module"]
            for node, block in zip(calls, segment.blocks, strict=True):
                if block != loss_block:
                    self._interpreter.recomputed.add(node.name)

    def __call__(self, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The segment's results; ``arguments`` in the segment's order."""
        if not self._interpreter.recomputed:
            return tuple(self.segment.module(*arguments))
        return tuple(self._interpreter.run(*arguments))


class _BlockInterpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.recomputed: set[str] = set()
        self._recompute_next = False

    def run_node(self, n: fx.Node) -> Any:
        self._recompute_next = n.name in self.recomputed
        return super().run_node(n)

    def call_module(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        module = self.fetch_attr(target)
        if self._recompute_next and torch.is_grad_enabled():
            return checkpoint(module, *args, use_reentrant=False, **kwargs)
        return module(*args, **kwargs)


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
