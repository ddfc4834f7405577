"""Plans beside rows: rows are grouped by what is no decision, and one that is faster is seen."""

from dataclasses import replace

import pytest

from autopar.estimation import ModelShape, pins_of
from benchmarks.experts import Compared, Planner, groups_of, left_out, print_violations
from tests.rows import estimate_row

ROW = estimate_row(
    ModelShape(
        hidden=512, layers=4, heads=8, kv_heads=8, ffn=2048, mlp="gelu4h", vocab=4096, seq=512
    ),
    id="a",
    world_size=8,
    global_batch=32,
    micro_batch=2,
    tp=2,
    pp=2,
    dp=2,
    seq_parallel=True,
    zero_stage=1,
    zero_shard=2,
)
ROWS = [
    ROW,
    replace(ROW, id="b", act_ckpt="full", micro_batch=4),
    replace(ROW, id="c", tp=1, pp=1, dp=8, zero_shard=4, seq_parallel=False),
    replace(ROW, id="d", act_ckpt="selective_op"),
    replace(ROW, id="e", pp=2, vpp=2, micro_batch=1),
    replace(ROW, id="f", dp=4, zero_shard=4, pp=1, micro_batch=3),
]


@pytest.fixture(scope="module")
def compared() -> dict[str, Compared]:
    return {found.row.id: found for found in Planner().compare(ROWS)}


def test_rows_of_a_group_differ_in_decisions_only():
    others = [
        replace(ROW, id="g", global_batch=64),
        replace(ROW, id="h", kernel="eager"),
        replace(ROW, id="i", grads_fp32=True),
        replace(ROW, id="j", node_net_gbps=100.0),
    ]
    assert [len(group) for group in groups_of([*ROWS, *others])] == [len(ROWS), 1, 1, 1, 1]
    given = {name: value for name, value in pins_of(ROW).items() if name != "kernel"}
    assert given == {name: value for name, value in pins_of(others[1]).items() if name != "kernel"}


def test_no_row_is_faster_than_the_plan(compared):
    assert compared.keys() == {"a", "b", "c", "d", "e", "f"}
    assert len({found.plan_s for found in compared.values()}) == 1
    assert not [row for row, found in compared.items() if found.is_faster]
    assert len({found.step_s for found in compared.values()}) == len(ROWS)


def test_choices_that_the_search_leaves_out_are_named(compared):
    assert {row: found.outside for row, found in compared.items()} == {
        "a": (),
        "b": (),
        "c": ("shards over 4 of 8 data ranks",),
        "d": ("recompute selective_op",),
        "e": ("cuts of virtual stages",),
        "f": ("a shorter last micro-batch",),
    }
    far = replace(compared["a"].layout, virtual_stages=5, pp=64, tp=16)
    named = list(left_out(far, Planner().instance(ROW)))
    assert "5 virtual stages" in named
    assert "a tensor axis over nodes" in named
    assert "fewer micro-batches than stages" in named


def test_a_row_that_is_faster_is_told_of_with_its_cause(compared, capsys):
    inside = replace(compared["a"], step_s=compared["a"].bound_s / 2)
    missed = replace(compared["b"], step_s=compared["b"].plan_s / 2, bound_s=0.0)
    outside = replace(compared["d"], step_s=compared["d"].bound_s / 2)
    print_violations([inside, missed, outside, compared["c"]])
    told = capsys.readouterr().out
    assert "4 rows that fit, 3 faster than the plan" in told
    assert "BELOW THE BOUND" in told
    assert "not found" in told
    assert "recompute selective_op" in told
    assert "1 rows of the space below what is proved of it" in told
