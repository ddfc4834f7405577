"""ZeRO stages of single blocks, where they are not those of the whole plan.

As text: the numbers of blocks, or the kind of them, and the stage: ``0=1, 4-11=2, block2=1``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autopar.ir.errors import InputError

if TYPE_CHECKING:
    from autopar.ir.plan import Plan

ZERO_STAGES = (1, 2, 3)
"""What blocks of one plan can have beside each other: all of them store shards."""

_RANGE = re.compile("[0-9]+(-[0-9]+)?")
_EXAMPLE = "blocks by number or kind: '0=1, 4-11=2, block2=1'"


def parse_zero_stages(text: str) -> dict[str, int]:
    """The stage of each group of blocks that ``text`` names; later ones hold.

    Raises:
        InputError: It is no such text.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, separator, stage = (piece.strip() for piece in part.partition("="))
        if not (name and separator) or stage not in map(str, ZERO_STAGES):
            raise InputError(
                f"zero_stages={text!r}: {part.strip()!r} is no ZeRO stage of blocks, 1, 2 or 3",
                hint=_EXAMPLE,
            )
        found.pop(name, None)  # its place is that of the later one
        found[name] = int(stage)
    return found


def with_exceptions(
    zero_stage: int, exceptions: Mapping[str, int], kinds: Sequence[str]
) -> tuple[int, ...]:
    """The ZeRO stage of each block, of which ``kinds`` has the kinds.

    Args:
        zero_stage: Of all blocks that are not excepted.
        exceptions: Stages by ranges of blocks (``4``, ``4-11``) and by kinds of them.
        kinds: Of every block of the model; ``""`` where they are not known.

    Raises:
        InputError: The model has no such blocks.
    """
    found = [zero_stage] * len(kinds)
    for name, stage in exceptions.items():
        for block in _blocks(name, kinds):
            found[block] = stage
    return tuple(found)


def _blocks(name: str, kinds: Sequence[str]) -> Sequence[int]:
    if name and name in kinds:
        return [block for block, kind in enumerate(kinds) if kind == name]
    if _RANGE.fullmatch(name):
        first, _, last = name.partition("-")
        blocks = range(int(first), int(last or first) + 1)
        if blocks and blocks[-1] < len(kinds):
            return blocks
    known = ", ".join(dict.fromkeys(filter(None, kinds)))
    raise InputError(
        f"zero_stages: the model has no blocks {name!r}, but {len(kinds)} blocks (from 0)"
        + f" of the kinds {known}" * bool(known),
        hint=_EXAMPLE,
    )


def block_zero_stages(plan: Plan) -> tuple[int, ...]:
    """The ZeRO stage of each block of a plan, which names them by number only.

    Raises:
        InputError: It excepts blocks that it does not have.
    """
    num_blocks = plan.segments[-1].last_block + 1
    return with_exceptions(plan.schedule.zero_stage, plan.schedule.zero_stages, [""] * num_blocks)


def segment_zero_stages(plan: Plan) -> tuple[int, ...]:
    """The same of each segment, whose blocks have one."""
    of_blocks = block_zero_stages(plan)
    return tuple(of_blocks[segment.first_block] for segment in plan.segments)


def zero_text(zero_stage: int, exceptions: Mapping[str, int]) -> str:
    """``3, 1 of blocks 0-3``."""
    excepted = [f"{stage} of blocks {blocks}" for blocks, stage in exceptions.items()]
    return ", ".join([str(zero_stage), *excepted])


def exceptions_of(zero_stage: int, zero_stages: Sequence[int]) -> dict[str, int]:
    """Ranges of blocks whose stage is another one than ``zero_stage``."""
    found: dict[str, int] = {}
    first = 0
    for block, stage in enumerate(zero_stages):
        if block + 1 == len(zero_stages) or zero_stages[block + 1] != stage:
            if stage != zero_stage:
                found[str(block) if block == first else f"{first}-{block}"] = stage
            first = block + 1
    return found
