"""Layouts are well-typed or rejected with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir import functional
from autopar.ir.errors import PlacementError
from autopar.ir.graph import BATCH, BlockKind, Role
from autopar.ir.layout import NodeTyping
from autopar.ir.placement import INVARIANT, PARTIAL, REPLICATED, Placement, sharded
from autopar.ir.typecheck import check_kind, kind_options
from tests.strategies import KindBuilder, degrees, kinds, random_layout

_aten = torch.ops.aten
I, R, P = INVARIANT, REPLICATED, PARTIAL


@given(st.data())
def test_random_well_typed_layouts_pass(data: st.DataObject) -> None:
    kind = data.draw(kinds())
    axes = data.draw(degrees())
    layout = random_layout(kind, data.draw, degrees=axes, batch=4)
    check_kind(kind, layout, degrees=axes, batch=4)
