"""Segments take what they need, pass on what later ones need, and share the modules of kinds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from autopar.ir.errors import InputError
from autopar.ir.graph import Role, ValueId, activation
from autopar.ir.mesh import Mesh
from autopar.ir.plan import SegmentPlan
from autopar.ir.program import Program
from autopar.passes import lower
from tests.passes.layouts import replicated
from tests.passes.random_models import random_model


def program_of(*bounds: tuple[int, int], tied: bool = True) -> Program:
    """A model of an embedding, 3 layers (which read the embedding too) and a head, cut at
    ``bounds``.
    """
    model = random_model(0, layers=3, tied=tied)
    segments = [
        SegmentPlan(stage=stage, first_block=first, last_block=last)
        for stage, (first, last) in enumerate(bounds)
    ]
    return lower(model, replicated(model), mesh=Mesh(), micro_batch_size=12, segments=segments)


def test_each_segment_receives_what_the_previous_one_sends():
    program = program_of((0, 0), (1, 1), (2, 3), (4, 4))
    assert program.segments[0].received == ()
    assert program.segments[-1].sent == ()
    for before, after in itertools.pairwise(program.segments):
        assert before.sent == after.received
        assert before.sent == before.results
        assert after.arguments[: len(after.received)] == after.received


def test_a_value_is_passed_through_segments_until_its_last_reader():
    program = program_of((0, 0), (1, 1), (2, 2), (3, 3), (4, 4))
    embedding = activation(0, 0)
    passing = [embedding in segment.sent for segment in program.segments]
    assert passing == [True, True, True, False, False]


def test_the_last_segment_gives_the_loss_and_its_weight():
    program = program_of((0, 3), (4, 4))
    assert program.segments[-1].results == (activation(4, 0), activation(4, 1))


def test_a_tied_parameter_belongs_to_every_segment_that_uses_it():
    program = program_of((0, 0), (1, 3), (4, 4))
    assert ["embed" in segment.parameters for segment in program.segments] == [True, False, True]
    assert "embed" in program.parameters


def test_inputs_go_to_the_segments_that_read_them():
    program = program_of((0, 0), (1, 3), (4, 4))
    ids, labels = ValueId(Role.INPUT, "ids"), ValueId(Role.INPUT, "labels")
    assert [ids in segment.arguments for segment in program.segments] == [True, False, False]
    assert [labels in segment.arguments for segment in program.segments] == [False, False, True]


def test_segments_share_one_module_for_each_kind():
    program = program_of((0, 1), (2, 2), (3, 4))
    modules = [segment.module.get_submodule("body") for segment in program.segments]
    assert all(module is program.kinds["body"] for module in modules)


@dataclass(frozen=True)
class Run:
    stage: int
    first_block: int
    last_block: int


def test_any_object_with_stage_and_blocks_cuts():
    model = random_model(0, layers=1)
    cut = Run(stage=3, first_block=0, last_block=2)
    program = lower(model, replicated(model), mesh=Mesh(), micro_batch_size=12, segments=[cut])
    assert program.segments[0].stage == 3


@pytest.mark.parametrize(
    "bounds",
    [[(0, 1), (3, 4)], [(1, 4)], [(0, 3)], [(0, 2), (2, 4)], [(0, 4), (5, 4)], [(0, 5)], []],
)
def test_cuts_that_are_no_partition_are_refused(bounds: list[tuple[int, int]]):
    with pytest.raises(InputError, match="segment"):
        program_of(*bounds)
