"""What the passes make and the runtime runs: local graphs of the kinds, and the segments built of
them.

A program is the same on every rank: ranks differ only in the axis groups that they attach
(``axis_<name>``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir.axis_group import AxisGroup
from autopar.ir.graph import ValueId
from autopar.ir.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """A value as one rank holds it: local shape for one full micro-batch, and its placement."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """A run of blocks on one pipeline stage.

    ``module`` calls the local graph modules of its blocks (submodules named after the kinds, shared
    by all segments of a program); it takes the values ``arguments`` in order and returns the values
    ``results`` as a tuple. ``received`` are the activations among the arguments that come from the
    previous segment, in the order in which the previous segment's ``sent`` lists them; a value that
    a later segment needs is passed through. The last segment's results include the loss and its
    weight.
    """

    index: int
    stage: int
    blocks: tuple[int, ...]
    module: fx.GraphModule
    arguments: tuple[ValueId, ...]
    results: tuple[ValueId, ...]
    received: tuple[ValueId, ...]
    sent: tuple[ValueId, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """The local form of a model under a plan."""

    kinds: Mapping[str, fx.GraphModule]
    segments: tuple[Segment, ...]
    values: Mapping[ValueId, LocalTensor]
    parameters: Mapping[str, LocalTensor]


AXIS_HANDLE = "axis_{}"
"""Name of the ``get_attr`` node (and attribute of a kind's graph module) that holds an axis group.
"""


def attach_axes(modules: Iterable[fx.GraphModule], groups: Mapping[str, AxisGroup]) -> None:
    """Give the graph modules of kinds the groups of this rank, by axis name."""
    for module in modules:
        for axis, group in groups.items():
            setattr(module, AXIS_HANDLE.format(axis), group)
