"""The plan file: what is written reads back, and nothing else does."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any, get_args

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir import plan as plan_module
from autopar.ir import plan_search
from autopar.ir.errors import PlanFormatError
from autopar.ir.plan import (
    BatchPlan,
    Certificate,
    ClusterRef,
    GroupRef,
    MeshPlan,
    ModelRef,
    MovePlan,
    NodePlan,
    ParameterPlan,
    Plan,
    Prediction,
    RankPrediction,
    RecomputeName,
    ReplicatedOp,
    SchedulePlan,
    SegmentPlan,
    TrainingPlan,
    from_json,
    json_schema,
    layout_text,
    read_plan,
    to_json,
)
from autopar.ir.plan_diff import diff_plans
from autopar.ir.plan_search import Alternative, DecisionValue, SearchReport, WhatIf
from autopar.solver import Cluster, solve
from tests.solver.small import MODEL, TRAINING

TEXT = st.text(max_size=8)
NAMES = st.text("abc.0", min_size=1, max_size=6)
COUNTS = st.integers(0, 2**62)
SMALL = st.integers(1, 4)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
RATES = st.floats(0, 1e6)
BETAS = st.floats(0, 1, exclude_max=True)
STATES = st.sampled_from(["I", "R", "P", "S(0)", "S(1)", "S(2, 2:1:1)"])
PLACEMENTS = st.tuples(STATES, STATES)


def tuples(
    values: st.SearchStrategy[Any], *, min_size: int = 0
) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, min_size=min_size, max_size=3).map(tuple)


_BUILT: dict[type, st.SearchStrategy[Any]] = {}


def builds(target: type, /, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """``st.builds``, once for each class: looking at its types takes longer than a draw."""
    if target not in _BUILT:
        _BUILT[target] = st.builds(target, **fields)
    return _BUILT[target]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that is consistent in itself; predictions and names are arbitrary."""
    mesh = MeshPlan(pp=draw(SMALL), dp_replicate=draw(SMALL), dp_shard=draw(SMALL), tp=draw(SMALL))
    dp = mesh.dp_replicate * mesh.dp_shard
    micro_batch_size, num_micro_batches = draw(SMALL), draw(SMALL)
    ends = [0]
    for _ in range(mesh.pp):
        ends.append(ends[-1] + draw(SMALL))
    nodes = builds(NodePlan, operands=tuples(PLACEMENTS), results=tuples(PLACEMENTS))
    return Plan(
        model=draw(
            builds(
                ModelRef,
                name=TEXT,
                source=st.none() | TEXT,
                seq_len=st.none() | SMALL,
                num_parameters=COUNTS,
                fingerprint=TEXT,
            )
        ),
        cluster=ClusterRef(
            hardware=draw(TEXT),
            nodes=draw(SMALL),
            gpus_per_node=mesh.pp * dp * mesh.tp,
            device=draw(TEXT),
            backend=draw(TEXT),
            fingerprint=draw(TEXT),
        ),
        mesh=mesh,
        batch=BatchPlan(
            global_batch_size=micro_batch_size * num_micro_batches * dp,
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
        ),
        schedule=SchedulePlan(
            name=draw(st.sampled_from(["1f1b", "layered"])),
            recompute=draw(st.sampled_from(get_args(RecomputeName))),
            zero_stage=draw(st.integers(0, 3)),
        ),
        training=TrainingPlan(
            precision=draw(st.sampled_from(["bf16", "fp32", "float64"])),
            optimizer=draw(st.sampled_from(["adamw", "adam", "sgd"])),
            learning_rate=draw(RATES),
            weight_decay=draw(RATES),
            betas=(draw(BETAS), draw(BETAS)),
            eps=draw(RATES),
            max_grad_norm=draw(st.none() | st.floats(1e-6, 1e6)),
            seed=draw(COUNTS),
        ),
        pins=draw(st.dictionaries(NAMES, st.integers(0, 9) | TEXT, max_size=2)),
        parameters=draw(
            st.dictionaries(
                NAMES,
                builds(
                    ParameterPlan,
                    names=tuples(NAMES),
                    shape=tuples(COUNTS),
                    dtype=TEXT,
                    requires_grad=st.booleans(),
                    placement=PLACEMENTS,
                    stages=tuples(SMALL),
                ),
                max_size=2,
            )
        ),
        segments=tuple(
            SegmentPlan(stage=stage, first_block=ends[stage], last_block=ends[stage + 1] - 1)
            for stage in range(mesh.pp)
        ),
        layout_axes=("dp", "tp"),
        layout=draw(st.dictionaries(NAMES, st.dictionaries(NAMES, nodes, max_size=2), max_size=2)),
        moves=draw(
            tuples(
                builds(
                    MovePlan,
                    kind=TEXT,
                    value=TEXT,
                    axis=TEXT,
                    source=STATES,
                    target=STATES,
                    forward=TEXT,
                    backward=TEXT,
                    bytes=COUNTS,
                )
            )
        ),
        replicated_ops=draw(
            tuples(builds(ReplicatedOp, op=TEXT, source=TEXT, count=COUNTS, seconds=NUMBERS))
        ),
        certificate=draw(
            builds(
                Certificate,
                status=st.sampled_from(["optimal", "feasible"]),
                objective_s=NUMBERS,
                bound_s=NUMBERS,
                gap=NUMBERS,
                solve_s=NUMBERS,
                num_candidates=COUNTS,
                num_solved=COUNTS,
                statement=TEXT,
            )
        ),
        prediction=draw(
            builds(
                Prediction,
                step_s=NUMBERS,
                mfu=NUMBERS,
                tokens_per_s=NUMBERS,
                model_flops=NUMBERS,
                usable_bytes=COUNTS,
                ranks=tuples(
                    builds(
                        RankPrediction,
                        stage=SMALL,
                        num_ranks=SMALL,
                        peak_bytes=COUNTS,
                        bytes_by_cause=st.dictionaries(TEXT, COUNTS, max_size=2),
                        seconds_by_cause=st.dictionaries(TEXT, NUMBERS, max_size=2),
                    )
                ),
            )
        ),
        alternatives=draw(
            tuples(
                builds(
                    Alternative,
                    description=TEXT,
                    step_s=st.none() | NUMBERS,
                    reason=TEXT,
                    bound_s=st.none() | NUMBERS,
                    seconds_by_cause=st.dictionaries(TEXT, NUMBERS, max_size=2),
                    bytes_by_cause=st.dictionaries(TEXT, COUNTS, max_size=2),
                )
            )
        ),
        search=draw(
            st.none()
            | builds(
                SearchReport,
                fates=st.dictionaries(TEXT, COUNTS, max_size=2),
                values=tuples(
                    builds(
                        DecisionValue,
                        decision=TEXT,
                        value=TEXT,
                        num_candidates=COUNTS,
                        bound_s=st.none() | NUMBERS,
                        step_s=st.none() | NUMBERS,
                        chosen=st.booleans(),
                    )
                ),
            )
        ),
        what_if=draw(
            tuples(
                builds(
                    WhatIf,
                    change=TEXT,
                    step_s=NUMBERS,
                    bound_s=NUMBERS,
                    description=TEXT,
                    same_decisions=st.booleans(),
                )
            )
        ),
    )


SCHEMA = jsonschema.Draft202012Validator(json_schema())


@settings(max_examples=30)
@given(plan=plans())
def test_a_plan_reads_back_and_fits_the_schema(plan: Plan):
    text = to_json(plan)
    assert from_json(text) == plan
    assert to_json(from_json(text)) == text
    SCHEMA.validate(json.loads(text))
    assert layout_text(plan.typed_layout(), plan.layout_axes) == plan.layout


@settings(max_examples=5)
@given(plan=plans())
def test_a_saved_plan_reads_back(tmp_path_factory: pytest.TempPathFactory, plan: Plan):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    assert read_plan(path) == plan


def records(document: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Paths of all objects that are records, not maps from names: their fields are known."""
    maps = (
        *("pins", "parameters", "layout", "zero_stages"),
        *("bytes_by_cause", "seconds_by_cause", "fates"),
    )
    found: list[tuple[str | int, ...]] = []
    if isinstance(document, dict):
        is_map = bool(path) and (path[-1] in maps or path[-2:-1] == ("layout",))
        if not is_map:
            found.append(path)
        for key, value in document.items():
            found += records(value, (*path, key))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            found += records(value, (*path, index))
    return found


def record_at(document: Any, path: tuple[str | int, ...]) -> dict[str, Any]:
    for key in path:
        document = document[key]
    assert isinstance(document, dict)
    return document


ADDED_LATER = {
    field.name
    for module in (plan_module, plan_search)
    for found in vars(module).values()
    if isinstance(found, type) and dataclasses.is_dataclass(found)
    if found.__module__ == module.__name__  # a mesh has degrees by default, a plan's has not
    for field in dataclasses.fields(found)
    if (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
} - {"format", "version"}
"""Fields that plans of older versions lack, and that have a default."""


@settings(max_examples=20)
@given(plan=plans(), data=st.data())
def test_an_unknown_or_missing_field_anywhere_is_refused(plan: Plan, data: st.DataObject):
    document = json.loads(to_json(plan))
    path = data.draw(st.sampled_from(records(document)), label="record")
    record = record_at(document, path)
    if data.draw(st.booleans(), label="unknown"):
        record["surprise"] = 1
    else:
        required = sorted(set(record) - ADDED_LATER)
        del record[data.draw(st.sampled_from(required), label="missing")]
    with pytest.raises(PlanFormatError, match="plan"):
        from_json(json.dumps(document))


@settings(max_examples=20)
@given(plan=plans(), data=st.data())
def test_a_value_of_another_type_is_refused(plan: Plan, data: st.DataObject):
    document = json.loads(to_json(plan))
    path = data.draw(st.sampled_from(records(document)), label="record")
    record = record_at(document, path)
    name = data.draw(st.sampled_from(sorted(record)), label="field")
    is_text = isinstance(record[name], str) or (path, name) == (("model",), "source")
    record[name] = [True] if is_text else "text"
    with pytest.raises(PlanFormatError):
        from_json(json.dumps(document))


@settings(max_examples=20)
@given(plan=plans(), share=st.floats(0, 0.999))
def test_a_truncated_plan_is_refused(plan: Plan, share: float):
    text = to_json(plan)
    with pytest.raises(PlanFormatError, match="not a JSON document"):
        from_json(text[: int(share * len(text))])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a JSON document"),
        ("null", "not an autopar plan"),
        ("[]", "not an autopar plan"),
        ("{}", "not an autopar plan"),
        ('{"format": "autopar-plan"}', "plan version None"),
        (
            '{"format": "autopar-plan", "version": 2}',
            "plan version 2; this autopar reads version 1",
        ),
        ('{"format": "autopar-plan", "version": 1}', "field model"),
        (b"\xff\xfe", "not a JSON document"),
    ],
)
def test_what_is_no_plan_of_this_version_is_refused(text: str | bytes, said: str):
    with pytest.raises(PlanFormatError, match=said):
        from_json(text)


@settings(max_examples=10)
@given(plan=plans())
def test_decisions_that_contradict_each_other_are_refused(plan: Plan):
    small = dataclasses.replace(plan.cluster, nodes=1, gpus_per_node=1)
    mesh = dataclasses.replace(plan.mesh, pp=plan.mesh.pp + 1)
    batch = dataclasses.replace(plan.batch, global_batch_size=plan.batch.global_batch_size + 1)
    last = dataclasses.replace(plan.segments[-1], first_block=99, last_block=99)
    short = ParameterPlan(
        names=("w",), shape=(4,), dtype="float32", requires_grad=True, placement=("R",), stages=(0,)
    )
    wrong: list[tuple[str, Plan]] = [
        ("more than the cluster", dataclasses.replace(plan, cluster=small, mesh=mesh)),
        ("global batch", dataclasses.replace(plan, batch=batch)),
        ("layout axes", dataclasses.replace(plan, layout_axes=("tp", "dp"))),
        ("w has 1 states for 2", dataclasses.replace(plan, parameters={"w": short})),
        ("cover every pipeline stage", dataclasses.replace(plan, segments=())),
        ("does not continue", dataclasses.replace(plan, segments=(*plan.segments[:-1], last))),
    ]
    for said, contradiction in wrong:
        with pytest.raises(PlanFormatError, match=said):
            from_json(to_json(contradiction))


@pytest.mark.parametrize(
    ("said", "nodes", "groups"),
    [
        ("without nodes or GPUs", 0, ()),
        ("without nodes or GPUs", 4, (("a", 0, 8), ("b", 4, 8))),
        ("without nodes or GPUs", 4, (("a", 5, 8), ("b", -1, 8))),
        ("two or more", 4, (("a", 4, 8),)),
        ("its own name", 4, (("a", 2, 8), ("a", 2, 8))),
        ("groups have 5 nodes, the cluster 4", 4, (("a", 2, 8), ("b", 3, 8))),
    ],
)
@settings(max_examples=3)
@given(plan=plans())
def test_groups_that_contradict_their_cluster_are_refused(
    said: str, nodes: int, groups: tuple[tuple[str, int, int], ...], plan: Plan
):
    refs = tuple(GroupRef(name=name, nodes=n, gpus_per_node=each) for name, n, each in groups)
    cluster = dataclasses.replace(plan.cluster, nodes=nodes, groups=refs)
    with pytest.raises(PlanFormatError, match=said):
        from_json(to_json(dataclasses.replace(plan, cluster=cluster)))


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": ()},
        {"step_s": 0.0},
        {"step_s": math.nan},
        {"usable_bytes": -5},
    ],
)
def test_predictions_that_say_nothing_are_refused_where_they_are_read(
    changes: dict[str, Any],
) -> None:
    plan = _planned()
    edited = dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, **changes))
    with pytest.raises(PlanFormatError):
        edited.explain()
    with pytest.raises(PlanFormatError):
        diff_plans(plan, edited)


@pytest.mark.parametrize("changes", [{"bound_s": 1e9}, {"gap": 5.0}, {"objective_s": 0.0}])
def test_what_proves_nothing_is_refused(changes: dict[str, Any]) -> None:
    plan = _planned()
    proved = dataclasses.replace(plan.certificate, **changes)
    with pytest.raises(PlanFormatError):
        dataclasses.replace(plan, certificate=proved).explain()


def test_each_stage_names_the_blocks_that_it_computes_again() -> None:
    plan = _planned()
    segment = plan.segments[0]
    schedule = dataclasses.replace(
        plan.schedule, recompute="blocks", recomputed_blocks=(segment.first_block,)
    )
    assert "computed again" not in plan.explain()
    told = dataclasses.replace(plan, schedule=schedule).explain()
    assert f"stage {segment.stage}  blocks " in told
    assert told.count(f", computed again: {segment.first_block}\n") == 1


def test_each_stage_names_the_blocks_whose_ops_it_computes_again() -> None:
    plan, num = _planned(), _planned().segments[-1].last_block + 1
    schedule = dataclasses.replace(
        plan.schedule, recompute="blocks", recomputed_blocks=(1,), recomputed_by_op=(0, 2)
    )
    told = dataclasses.replace(plan, schedule=schedule).explain()
    assert f"recompute blocks (1 whole, 2 by op of {num})" in told
    assert ", computed again: 1, computed again by op: 0" in told


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recomputed_blocks": (99, -1)}, "recomputed_blocks that the plan does not have"),
        ({"recomputed_by_op": (99,)}, "recomputed_by_op that the plan does not have"),
        (
            {"recomputed_blocks": (0, 1), "recomputed_by_op": (1,)},
            "blocks 1 are in recomputed_blocks and in recomputed_by_op",
        ),
        (
            {"recompute": "none", "recomputed_blocks": (1,)},
            "recompute none leaves no blocks to list, but recomputed_blocks has 1",
        ),
        (
            {"recompute": "selective_op", "recomputed_by_op": (0, 1)},
            "recompute selective_op leaves no blocks to list, but recomputed_by_op has 2",
        ),
        ({"recomputed_by_op": (0, 1, 0)}, "recomputed_by_op has blocks 0 twice"),
        ({"gathered_again": (99,)}, "gathered_again that the plan does not have"),
        ({"gathered_again": (1, 1)}, "gathered_again has blocks 1 twice"),
        (
            {"recomputed_blocks": (0, 1), "gathered_again": (1, 2)},
            "blocks 1 are in recomputed_blocks and in gathered_again",
        ),
    ],
)
def test_recomputed_blocks_are_those_of_the_plan(changes: dict[str, object], said: str) -> None:
    plan = _planned()
    schedule = dataclasses.replace(plan.schedule, recompute="blocks")
    schedule = dataclasses.replace(schedule, **changes)  # type: ignore[arg-type]
    with pytest.raises(PlanFormatError, match=said):
        from_json(to_json(dataclasses.replace(plan, schedule=schedule)))


def test_kernels_are_told_where_they_are_others_and_refused_where_there_are_none() -> None:
    plan = _planned()
    assert "kernels" not in plan.explain()
    fused, unknown = (
        dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, kernels=kernels))
        for kernels in ("eager + fused norms", "eager + fused all")
    )
    assert ", kernels eager + fused norms\n" in from_json(to_json(fused)).explain()
    with pytest.raises(PlanFormatError, match=r"field schedule\.kernels: no kernels are called"):
        from_json(to_json(unknown))


def test_each_stage_names_the_blocks_that_gather_again() -> None:
    plan, num = _planned(), _planned().segments[-1].last_block + 1
    schedule = dataclasses.replace(plan.schedule, recompute="none", gathered_again=(0, 1))
    told = from_json(to_json(dataclasses.replace(plan, schedule=schedule))).explain()
    assert f"recompute none, 2 gathered again of {num}" in told
    held = [
        segment.stage
        for segment in plan.segments
        for block in (0, 1)
        if segment.first_block <= block <= segment.last_block
    ]
    assert told.count(", gathered again: ") == len(set(held))


def test_plans_from_before_recomputation_by_op_are_read() -> None:
    plan = _planned()
    document = json.loads(to_json(plan))
    del document["schedule"]["recomputed_by_op"]
    del document["schedule"]["gathered_again"]
    assert from_json(json.dumps(document)) == plan


@functools.cache
def _planned() -> Plan:
    cluster = Cluster("cpu-local", gpus_per_node=4)
    return solve(MODEL, cluster, global_batch_size=8, training=TRAINING, pin={"pp": 2})
