"""The problem of blocks whose backward computes some ops again, from the problem of others.

Both have the same choices, so that a solution of one is one of the other. What is computed again
takes its forward once more in backward, is not kept, and is there again when backward reads it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from autopar.ir.rules.core import Option
from autopar.solver.layout.costing import Coster
from autopar.solver.layout.frame import Frame, FrameOp, KeptInside
from autopar.solver.layout.price import held_tensors, inside_bytes
from autopar.solver.layout.problem import Op, OpOption, Problem


def recomputing(problem: Problem, frame: Frame, coster: Coster) -> Problem:
    """``problem`` where the ops that ``frame``, made for ``coster``, says are computed again."""
    known: dict[Hashable, OpOption] = {}
    return replace(
        problem,
        frame=frame,
        ops=tuple(
            _op(op, again, coster, known) for op, again in zip(problem.ops, frame.ops, strict=True)
        ),
        held=held_tensors(frame, coster),
    )


def _op(op: Op, again: FrameOp, coster: Coster, known: dict[Hashable, OpOption]) -> Op:
    """``known`` are the options that were made, by those of the problem before: twins share."""
    options = []
    for option, held in zip(op.options, again.held, strict=True):
        key = (id(option), held, again.is_again, again.is_rebuilt)
        if key not in known:
            known[key] = _option(option, held, again, coster)
        options.append(known[key])
    return replace(op, options=tuple(options))


def _option(option: OpOption, held: tuple[int, ...], op: FrameOp, coster: Coster) -> OpOption:
    again_s = again_launch_s = 0.0
    rebuilt = 0
    if op.is_again:
        again_s = option.forward_s - option.forward_comm_s
        again_launch_s = option.forward_launch_s
        rebuilt = _rebuilt_bytes(op, option.option, coster)
    return replace(
        option,
        backward_s=option.backward_s + again_s,
        backward_launch_s=option.backward_launch_s + again_launch_s,
        again_s=again_s,
        again_launch_s=again_launch_s,
        rebuilt_bytes=rebuilt,
        held=held,
    )


def _rebuilt_bytes(op: FrameOp, option: Option, coster: Coster) -> int:
    """Of an op that is computed again: its results, if backward reads them, and its own bytes."""
    made = 0
    if op.is_rebuilt:
        pairs = zip(op.view.results, option.results, strict=True)
        made = sum(coster.bytes(tensor, state) for tensor, state in pairs)
    return made + inside_bytes(KeptInside(node=op.node, view=op.view, option=option), coster)
