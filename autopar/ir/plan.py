"""The plan: all decisions and what is predicted of them, as a versioned JSON document."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Literal

import pydantic
from pydantic.dataclasses import dataclass

from autopar.ir.errors import InputError, PlanFormatError
from autopar.ir.explain import explain
from autopar.ir.kernels import DEFAULT_KERNELS, parse_kernels
from autopar.ir.layout import Layout, NodeTyping
from autopar.ir.mesh import DATA_AXIS, LAYOUT_AXES, MESH_AXES, TENSOR_AXIS, Mesh
from autopar.ir.placement import Placement, parse_state
from autopar.ir.plan_search import STRICT, Alternative, ObjectivePlan, SearchReport, WhatIf
from autopar.ir.schedules import DEEPENED
from autopar.ir.zero_stages import ZERO_STAGES, block_zero_stages

PLAN_FORMAT: Literal["autopar-plan"] = "autopar-plan"
PLAN_VERSION: Literal[1] = 1

ScheduleName = Literal["1f1b", "interleaved", "layered", "zero_bubble"]
RecomputeName = Literal["none", "selective", "selective_op", "selective_layer", "blocks", "full"]
PrecisionName = Literal["bf16", "fp16", "fp32", "float64"]

WAITING = "waiting for other stages"
"""The cause of the seconds of a rank in which it does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ModelRef:
    """Which model the plan is for. ``source`` rebuilds it; None for a module that was given in
    memory.
    """

    name: str
    source: str | None
    seq_len: int | None
    num_parameters: int
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class GroupRef:
    """Nodes of one kind, of a cluster that has several."""

    name: str
    nodes: int
    gpus_per_node: int


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ClusterRef:
    """Which ranks the plan is for. ``device`` and ``backend`` come from the hardware file.

    ``groups`` are those of a cluster file in the order of ranks: the first ranks are started on the
    nodes of the first one. Without it all nodes are of one kind.
    """

    hardware: str
    nodes: int
    gpus_per_node: int
    device: str
    backend: str
    fingerprint: str
    groups: tuple[GroupRef, ...] = ()

    @property
    def num_gpus(self) -> int:
        """Ranks of all nodes."""
        if self.groups:
            return sum(group.nodes * group.gpus_per_node for group in self.groups)
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        """``4 × 8 × a100-80gb + 2 × 8 × h100-80gb``."""
        parts = [(group.nodes, group.gpus_per_node, group.name) for group in self.groups]
        one = (self.nodes, self.gpus_per_node, self.hardware)
        return " + ".join(f"{n} × {g} × {name}" for n, g, name in parts or [one])

    def used(self, num_ranks: int) -> str:
        """How many of its GPUs are used, and what they are."""
        text = f"{num_ranks} of {self.num_gpus}"
        return f"{text} GPUs ({self})" if self.groups else f"{text} × {self.hardware}"


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SharePlan:
    """Data ranks, one after the other, that have so many micro-batches each."""

    data_ranks: int
    num_micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class BatchPlan:
    """Sequences per step, per data rank and micro-batch, and micro-batches per step. The last
    micro-batch has what is left.

    With ``shares`` data ranks (of ``dp``) have unequal parts of the batch: some have fewer
    micro-batches than others, all of them full.
    """

    global_batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    shares: tuple[SharePlan, ...] = ()

    def micro_batches_of(self, data_rank: int) -> int:
        """Micro-batches of a data rank: of its coordinate on ``dp``."""
        for share in self.shares:
            if data_rank < share.data_ranks:
                return share.num_micro_batches
            data_rank -= share.data_ranks
        return self.num_micro_batches

    def last_size(self, batch_ranks: int) -> int:
        """Sequences of the last micro-batch per data rank, of ``batch_ranks`` data ranks."""
        if self.shares:
            return self.micro_batch_size
        own = self.global_batch_size // batch_ranks
        return own - self.micro_batch_size * (self.num_micro_batches - 1)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SchedulePlan:
    """Order of the work: schedule, recomputation, ZeRO stage, virtual stages on each stage; and by
    which kernels it is done (``autopar.ir.kernels``). Of ``recompute`` "blocks",
    ``recomputed_blocks`` are computed again whole, and ``recomputed_by_op`` only by the ops that
    "selective_op" chooses. Blocks ``gathered_again`` keep nothing that tensor ranks gather from
    their shards, and gather it in backward once more. ``extra_in_flight`` are micro-batches that
    stages run ahead more than 1F1B needs. The loss is computed in ``loss_chunks`` slices of a
    micro-batch's tokens. With ``offload_optimizer`` master weights and optimizer state are in the
    host's memory; what forwards of ``offloaded_blocks`` keep for their backwards is there
    meanwhile.
    ``zero_stages`` are those of blocks that have not ``zero_stage``: of ranges, ``4`` or ``4-11``.
    """

    name: ScheduleName
    recompute: RecomputeName
    zero_stage: int
    kernels: str = DEFAULT_KERNELS
    virtual_stages: int = 1
    recomputed_blocks: tuple[int, ...] = ()
    recomputed_by_op: tuple[int, ...] = ()
    gathered_again: tuple[int, ...] = ()
    extra_in_flight: int = 0
    loss_chunks: int = 1
    offload_optimizer: bool = False
    offloaded_blocks: tuple[int, ...] = ()
    zero_stages: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class TrainingPlan:
    """Numerics and optimizer.

    ``precision`` is that of compute. Gradients are accumulated in ``gradient_dtype`` and sent to be
    summed in ``reduce_dtype``; masters and moments are fp32 or wider.
    """

    precision: PrecisionName
    gradient_dtype: PrecisionName = "fp32"
    reduce_dtype: PrecisionName = "fp32"
    optimizer: Literal["adamw", "adam", "sgd"]
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    max_grad_norm: float | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ParameterPlan:
    """Where a logical parameter lives. ``placement`` has a state per layout axis, as text; ``dp``
    is how it is *used* (``R``: gradients are reduced), the ZeRO stage says how it is stored.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    placement: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SegmentPlan:
    """Blocks ``[first, last]`` on a pipeline stage."""

    stage: int
    first_block: int
    last_block: int


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class MovePlan:
    """A change of state inside a kind of block: one collective (or none) forward, its dual
    backward.
    """

    kind: str
    value: str
    axis: str
    source: str
    target: str
    forward: str
    backward: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ReplicatedOp:
    """An op without a rule: every rank computes it whole, for all sequences of a micro-batch.

    ``count`` ops of the model stand at ``source``; ``seconds`` of a step go into them on a rank
    that has them all.
    """

    op: str
    source: str
    count: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class NodePlan:
    """Placements (states as text, in order of ``layout_axes``) of a node's operands and results."""

    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Certificate:
    """What is proved of the objective. ``gap`` = 1 − bound / objective."""

    status: Literal["optimal", "feasible"]
    objective_s: float
    bound_s: float
    gap: float
    solve_s: float
    num_candidates: int
    num_solved: int
    statement: str


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class RankPrediction:
    """Ranks with the same role (pipeline stage): bytes and seconds of a step by cause.
    ``host_bytes`` are what it has offloaded to its host at its fullest.

    ``nodes`` are the groups of nodes that they are on, and ``usable_bytes`` what each of them may
    fill; None where all nodes are of one kind.
    """

    stage: int
    num_ranks: int
    peak_bytes: int
    bytes_by_cause: Mapping[str, int]
    seconds_by_cause: Mapping[str, float]
    nodes: str | None = None
    usable_bytes: int | None = None
    host_bytes: int = 0


def fullest_of(ranks: Sequence[RankPrediction]) -> RankPrediction:
    """The ranks that have least memory left."""
    return max(ranks, key=lambda rank: rank.peak_bytes - (rank.usable_bytes or 0))


def critical_of(ranks: Sequence[RankPrediction]) -> RankPrediction:
    """The ranks that wait least for others."""
    return min(ranks, key=lambda rank: rank.seconds_by_cause.get(WAITING, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SegmentCosts:
    """Seconds of a segment's actions on a rank, each for one micro-batch; ``send_s`` is that of the
    message to the next segment's stage and of the one back. ``held_bytes`` live from a forward to
    its backward. Of a backward in two parts, ``weight_s`` of ``backward_s`` is the weight part, and
    ``weight_bytes`` live between the parts. ``copy_s`` is what it takes to copy offloaded
    activations, either way, beside all else.
    """

    forward_s: float
    backward_s: float
    gather_s: float
    reduce_s: float
    send_s: float
    held_bytes: int
    weight_s: float = 0.0
    weight_bytes: int = 0
    copy_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ActionCosts:
    """What the simulator needs beside the schedule: costs of the segments, seconds of the optimizer
    on each stage, and by how many seconds a second of overlap lengthens compute; where stages
    differ in that, ``slowdowns`` are those of each.
    """

    segments: tuple[SegmentCosts, ...]
    optimizer_s: tuple[float, ...]
    slowdown: float
    slowdowns: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Prediction:
    """Predicted step. ``mfu`` counts model FLOPs without recomputation; ``action_costs`` are what
    it was simulated with, None in plans of versions that did not store them. ``usable_bytes`` are
    those of the fullest rank. With unequal shares of the batch ``ranks`` and ``beside`` have an
    entry for each of the shares, and ``action_costs`` are those of the ranks that wait least.
    """

    step_s: float
    mfu: float
    tokens_per_s: float
    model_flops: float
    usable_bytes: int
    ranks: tuple[RankPrediction, ...]
    action_costs: ActionCosts | None = None
    beside: tuple[ActionCosts, ...] = ()

    def of_stage(self, stage: int) -> RankPrediction:
        """The ranks of a stage; where they differ, those that wait least."""
        return critical_of([rank for rank in self.ranks if rank.stage == stage])

    @property
    def fullest(self) -> RankPrediction:
        """The ranks that have least memory left."""
        return fullest_of(self.ranks)

    @property
    def critical(self) -> RankPrediction:
        """The ranks that wait least for others: where seconds are saved, the step gets shorter."""
        return critical_of(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class MeshPlan:
    """Degrees by axis name; their product is the GPUs used. ``axis_order`` has the axes outermost
    first, as ranks are numbered.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int = 1
    ep: int = 1
    tp: int
    axis_order: tuple[str, ...] = MESH_AXES

    @classmethod
    def of(cls, mesh: Mesh) -> MeshPlan:
        """The degrees of a mesh."""
        return cls(**dataclasses.asdict(mesh))


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Plan:
    """All decisions for one model on one cluster."""

    format: Literal["autopar-plan"] = PLAN_FORMAT
    version: Literal[1] = PLAN_VERSION
    model: ModelRef
    cluster: ClusterRef
    mesh: MeshPlan
    batch: BatchPlan
    schedule: SchedulePlan
    training: TrainingPlan
    pins: Mapping[str, int | str]
    parameters: Mapping[str, ParameterPlan]
    segments: tuple[SegmentPlan, ...]
    layout_axes: tuple[str, ...]
    layout: Mapping[str, Mapping[str, NodePlan]]
    moves: tuple[MovePlan, ...]
    replicated_ops: tuple[ReplicatedOp, ...]
    certificate: Certificate
    prediction: Prediction
    alternatives: tuple[Alternative, ...]
    search: SearchReport | None = None
    what_if: tuple[WhatIf, ...] = ()
    objective: ObjectivePlan | None = None

    def device_mesh(self) -> Mesh:
        """The mesh that the degrees describe."""
        return Mesh(**dataclasses.asdict(self.mesh))

    def placement(self, states: tuple[str, ...]) -> Placement:
        """States on ``layout_axes`` as a placement over all of ``LAYOUT_AXES``."""
        found = dict(zip(self.layout_axes, states, strict=True))
        return tuple(parse_state(found.get(axis, "I")) for axis in LAYOUT_AXES)

    def offloaded_segments(self) -> tuple[int, ...]:
        """Segments whose forwards keep what they keep on the host."""
        listed = frozenset(self.schedule.offloaded_blocks)
        return tuple(
            index for index, segment in enumerate(self.segments) if segment.first_block in listed
        )

    def explain(self) -> str:
        """The plan in words: decisions, time and memory by cause, collectives, and what lost.

        Raises:
            PlanFormatError: Its predictions are not those of its stages, or out of range.
        """
        check_prediction(self)
        return explain(self)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; ``read_plan`` reads it back."""
        Path(path).write_text(to_json(self) + "\n")

    def typed_layout(self) -> Layout:
        """The layout as placements over all of ``LAYOUT_AXES``."""
        return {
            kind: {
                node: NodeTyping(
                    operands=tuple(map(self.placement, typing.operands)),
                    results=tuple(map(self.placement, typing.results)),
                )
                for node, typing in nodes.items()
            }
            for kind, nodes in self.layout.items()
        }


def layout_text(layout: Layout, axes: tuple[str, ...]) -> dict[str, dict[str, NodePlan]]:
    """A layout in the form in which a plan stores it; inverse of ``Plan.typed_layout``."""
    return {
        kind: {
            node: NodePlan(
                operands=tuple(placement_text(placement, axes) for placement in typing.operands),
                results=tuple(placement_text(placement, axes) for placement in typing.results),
            )
            for node, typing in nodes.items()
        }
        for kind, nodes in layout.items()
    }


def placement_text(placement: Placement, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The states on ``axes``, the layout axes of a plan."""
    return tuple(str(placement[LAYOUT_AXES.index(axis)]) for axis in axes)


def plan_axes(mesh: Mesh) -> tuple[str, ...]:
    """The layout axes that a plan lists: data and tensor axis, and others of several ranks."""
    always = (DATA_AXIS, TENSOR_AXIS)
    return tuple(axis for axis in LAYOUT_AXES if axis in always or mesh.size(axis) > 1)


_adapter: pydantic.TypeAdapter[Plan] = pydantic.TypeAdapter(Plan)


def to_json(plan: Plan) -> str:
    """The plan as JSON text; the same plan gives the same text."""
    return _adapter.dump_json(plan, indent=1).decode()


def from_json(text: str | bytes, *, where: str = "plan") -> Plan:
    """The plan that ``to_json`` wrote.

    Raises:
        PlanFormatError: not JSON, not a plan, another version, unknown or missing fields, or values
            that do not fit.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise PlanFormatError(f"not a JSON document: {error}", where=where) from None
    if not isinstance(document, dict) or document.get("format") != PLAN_FORMAT:
        raise PlanFormatError("not an autopar plan (no format: autopar-plan)", where=where)
    if document.get("version") != PLAN_VERSION:
        raise PlanFormatError(
            f"plan version {document.get('version')!r}; this autopar reads version {PLAN_VERSION}",
            where=where,
            hint="plan again with this version",
        )
    try:
        plan = _adapter.validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise PlanFormatError(f"field {field}: {first['msg']}", where=where) from None
    _check_consistency(plan, where)
    return plan


def _check_consistency(plan: Plan, where: str) -> None:
    _check_cluster(plan.cluster, where)
    if sorted(plan.mesh.axis_order) != sorted(MESH_AXES):
        raise PlanFormatError(
            f"mesh.axis_order has {', '.join(plan.mesh.axis_order) or 'no axis'}, and not each of "
            f"{', '.join(MESH_AXES)} once",
            where=where,
        )
    num_ranks = plan.device_mesh().num_ranks
    if num_ranks > plan.cluster.num_gpus:
        raise PlanFormatError(f"the mesh has {num_ranks} ranks, more than the cluster", where=where)
    _check_layout_axes(plan, where)
    mesh = plan.device_mesh()
    if plan.batch.shares:
        _check_shares(plan.batch, mesh, where)
    else:
        _check_batch(plan.batch, mesh.batch_ranks, where)
    stages = [segment.stage for segment in plan.segments]
    if not stages or sorted(set(stages)) != list(range(plan.mesh.pp)):
        raise PlanFormatError("segments do not cover every pipeline stage", where=where)
    expected = 0
    for index, segment in enumerate(plan.segments):
        if segment.first_block != expected or segment.last_block < segment.first_block:
            raise PlanFormatError(f"segment {index} does not continue the one before", where=where)
        expected = segment.last_block + 1
    _check_schedule(plan.schedule, stages, where)
    _check_settings(plan, where)
    _check_zero_stages(plan, where)
    _check_recomputed(plan.schedule, plan.segments[-1].last_block, where)
    _check_offloaded(plan, where)
    if plan.prediction.action_costs is not None:
        _check_costs(plan, plan.prediction.action_costs, where)


def _check_zero_stages(plan: Plan, where: str) -> None:
    """Blocks whose ZeRO stage is their own are those of whole segments, and all store shards."""
    schedule = plan.schedule
    if not schedule.zero_stages:
        return
    try:
        stages = block_zero_stages(plan)
    except InputError as error:
        raise PlanFormatError(f"field schedule.{error.what}", where=where) from None
    for stage in (schedule.zero_stage, *stages):
        if stage not in ZERO_STAGES:
            raise PlanFormatError(
                f"field schedule.zero_stages: ZeRO stage {stage} beside others; blocks of one plan "
                "can have 1, 2 and 3",
                where=where,
            )
    for index, segment in enumerate(plan.segments):
        if len(set(stages[segment.first_block : segment.last_block + 1])) > 1:
            raise PlanFormatError(
                f"field schedule.zero_stages: segment {index} has blocks of several stages",
                where=where,
            )


def _check_recomputed(schedule: SchedulePlan, last_block: int, where: str) -> None:
    """Blocks are listed for ``recompute`` "blocks" only, and each once and in one way; those that
    gather again beside any, but for blocks that are computed again whole.
    """
    whole, by_op = schedule.recomputed_blocks, schedule.recomputed_by_op
    gathered = schedule.gathered_again
    names = ("recomputed_blocks", "recomputed_by_op", "gathered_again")
    for name, blocks in zip(names, (whole, by_op, gathered), strict=True):
        if blocks and name != "gathered_again" and schedule.recompute != "blocks":
            raise PlanFormatError(
                f"recompute {schedule.recompute} leaves no blocks to list, but {name} has "
                f"{len(blocks)}",
                where=where,
                hint=f"set recompute to blocks, or leave {name} empty",
            )
        if any(not 0 <= block <= last_block for block in blocks):
            raise PlanFormatError(f"{name} that the plan does not have", where=where)
        _check_once(blocks, name, where)
    _check_apart(
        whole,
        by_op,
        "in recomputed_blocks and in recomputed_by_op",
        where=where,
        hint="a block is computed again whole, or by its ops",
    )
    _check_apart(
        whole,
        gathered,
        "in recomputed_blocks and in gathered_again",
        where=where,
        hint="a block that is computed again whole gathers again, too",
    )


def _check_once(blocks: Sequence[int], name: str, where: str) -> None:
    """No block is in a list twice: it would count twice."""
    twice = sorted({block for block in blocks if blocks.count(block) > 1})
    if twice:
        raise PlanFormatError(f"{name} has blocks {', '.join(map(str, twice))} twice", where=where)


def _check_apart(
    some: Iterable[int], others: Iterable[int], lists: str, *, where: str, hint: str
) -> None:
    """No block is in both of two lists."""
    twice = sorted(set(some) & set(others))
    if twice:
        raise PlanFormatError(
            f"blocks {', '.join(map(str, twice))} are {lists}", where=where, hint=hint
        )


def _check_offloaded(plan: Plan, where: str) -> None:
    """Blocks with offloaded activations are segments, and nothing of them is computed again."""
    schedule = plan.schedule
    listed = frozenset(schedule.offloaded_blocks)
    whole = [segment.first_block for segment in plan.segments if segment.first_block in listed]
    apart = {s.first_block for s in plan.segments if s.first_block == s.last_block}
    if len(whole) != len(listed) or not listed <= apart:
        raise PlanFormatError(
            "offloaded_blocks that the plan does not have, or that share a segment with others",
            where=where,
            hint="a block whose activations are offloaded is a segment",
        )
    _check_once(schedule.offloaded_blocks, "offloaded_blocks", where)
    again = {*schedule.recomputed_blocks, *schedule.recomputed_by_op, *schedule.gathered_again}
    _check_apart(
        listed,
        again,
        "in offloaded_blocks and done again",
        where=where,
        hint="what is offloaded need not be computed or gathered again",
    )
    if listed and schedule.recompute not in ("none", "blocks"):
        raise PlanFormatError(
            f"recompute {schedule.recompute} says what of every block is kept: none is offloaded",
            where=where,
            hint="set recompute to blocks, or leave offloaded_blocks empty",
        )


def check_prediction(plan: Plan) -> None:
    """Raise ``PlanFormatError`` unless every stage is predicted once, and what is proved is no more
    than what was found: a plan runs without that, but says nothing.
    """
    prediction, proved, where = plan.prediction, plan.certificate, plan.model.name
    stages, num_shares = [rank.stage for rank in prediction.ranks], len(plan.batch.shares) or 1
    if stages != num_shares * list(range(plan.mesh.pp)):
        raise PlanFormatError(
            f"predictions of stages {stages}, but the plan has {plan.mesh.pp} of them", where=where
        )
    numbers = (prediction.step_s, proved.objective_s)
    if not all(0 < number < math.inf for number in numbers) or prediction.usable_bytes < 1:
        raise PlanFormatError("a predicted step or memory is out of range", where=where)
    if not 0 <= proved.bound_s <= proved.objective_s * (1 + 1e-9) or not 0 <= proved.gap <= 1:
        raise PlanFormatError(
            f"a bound of {proved.bound_s} s is not one of {proved.objective_s} s", where=where
        )


def _check_schedule(schedule: SchedulePlan, stages: list[int], where: str) -> None:
    """Virtual stages are as many as the plan says, and go round the stages."""
    virtual = schedule.virtual_stages
    is_possible = {
        "1f1b": virtual == 1,
        "interleaved": virtual > 1,
        "layered": virtual >= 1,
        "zero_bubble": virtual >= 1,
    }
    if not is_possible[schedule.name]:
        raise PlanFormatError(
            f"schedule {schedule.name} with virtual_stages {virtual}", where=where
        )
    if virtual == 1:
        return
    holders = [stage for stage, _ in itertools.groupby(stages)]
    pp = max(stages) + 1
    if holders != [number % pp for number in range(pp * virtual)]:
        raise PlanFormatError(
            f"segments on stages {stages}, but virtual stage c of {pp} × {virtual} belongs on "
            f"stage c mod {pp}",
            where=where,
        )


def _check_costs(plan: Plan, costs: ActionCosts, where: str) -> None:
    """As many costs as segments and stages, and none that time could not take."""
    if (len(costs.segments), len(costs.optimizer_s)) != (len(plan.segments), plan.mesh.pp):
        raise PlanFormatError(
            f"action costs of {len(costs.segments)} segments on {len(costs.optimizer_s)} stages, "
            f"but the plan has {len(plan.segments)} on {plan.mesh.pp}",
            where=where,
        )
    numbers = [costs.slowdown, *costs.optimizer_s]
    for segment in costs.segments:
        numbers += [segment.forward_s, segment.backward_s, segment.gather_s]
        numbers += [segment.reduce_s, segment.send_s, segment.held_bytes]
        numbers += [segment.weight_s, segment.weight_bytes, segment.backward_s - segment.weight_s]
        numbers += [segment.copy_s]
    for number in numbers:
        if not 0 <= number < math.inf:
            raise PlanFormatError(f"action costs: {number} is out of range", where=where)
    if costs.slowdown > 1:
        raise PlanFormatError(
            f"action costs: a slowdown of {costs.slowdown} is out of range", where=where
        )


def _check_shares(batch: BatchPlan, mesh: Mesh, where: str) -> None:
    numbers = [share.num_micro_batches for share in batch.shares]
    if sum(share.data_ranks for share in batch.shares) != mesh.dp:
        raise PlanFormatError(f"shares are not those of {mesh.dp} data ranks", where=where)
    if any(share.data_ranks < 1 for share in batch.shares) or min(numbers) < 1:
        raise PlanFormatError("a share of the batch has no ranks or no micro-batch", where=where)
    each = batch.micro_batch_size * mesh.ep
    total = each * sum(share.data_ranks * share.num_micro_batches for share in batch.shares)
    if total != batch.global_batch_size or max(numbers) != batch.num_micro_batches:
        raise PlanFormatError(
            f"shares have {total} sequences in up to {max(numbers)} micro-batches, but the global "
            f"batch has {batch.global_batch_size} in {batch.num_micro_batches}",
            where=where,
        )


def _check_batch(batch: BatchPlan, batch_ranks: int, where: str) -> None:
    own, rest = divmod(batch.global_batch_size, batch_ranks)
    if rest or own < 1:
        raise PlanFormatError(
            f"{batch_ranks} data ranks do not divide a global batch of {batch.global_batch_size}",
            where=where,
        )
    size, num = batch.micro_batch_size, batch.num_micro_batches
    if size < 1 or num != -(-own // size):
        raise PlanFormatError(
            f"{num} micro-batches of {size} sequences, but a data rank has {own} of the global "
            "batch",
            where=where,
        )


def _check_cluster(cluster: ClusterRef, where: str) -> None:
    """That counts are those of nodes, and of groups of nodes if there are several."""
    counts = [cluster.nodes, cluster.gpus_per_node]
    counts += [n for group in cluster.groups for n in (group.nodes, group.gpus_per_node)]
    if min(counts) < 1:
        raise PlanFormatError("a cluster, or a group, without nodes or GPUs", where=where)
    if not cluster.groups:
        return
    names = {group.name for group in cluster.groups}
    if not 1 < len(names) == len(cluster.groups):
        raise PlanFormatError(
            "a cluster of groups has two or more, each with its own name", where=where
        )
    nodes = sum(group.nodes for group in cluster.groups)
    if nodes != cluster.nodes:
        raise PlanFormatError(
            f"groups have {nodes} nodes, the cluster {cluster.nodes}", where=where
        )


def _check_layout_axes(plan: Plan, where: str) -> None:
    axes = plan.layout_axes
    if list(axes) != [axis for axis in LAYOUT_AXES if axis in axes]:
        raise PlanFormatError(
            f"layout axes {axes}, expected some of {LAYOUT_AXES} in this order", where=where
        )
    mesh = plan.device_mesh()
    for axis in LAYOUT_AXES:
        if axis not in axes and mesh.size(axis) > 1:
            raise PlanFormatError(
                f"the layout axes {axes} lack {axis}, which has {mesh.size(axis)} ranks",
                where=where,
            )
    placed = [
        *((name, parameter.placement) for name, parameter in plan.parameters.items()),
        *(
            (f"{kind}.{node}", states)
            for kind, nodes in plan.layout.items()
            for node, typing in nodes.items()
            for states in (*typing.operands, *typing.results)
        ),
    ]
    for name, states in placed:
        if len(states) != len(axes):
            raise PlanFormatError(
                f"{name} has {len(states)} states for {len(axes)} layout axes", where=where
            )


def _check_settings(plan: Plan, where: str) -> None:
    """Numbers with which every step would run, and be wrong."""
    training, schedule = plan.training, plan.schedule
    extra = schedule.extra_in_flight
    ranges = {
        "schedule.zero_stage": (schedule.zero_stage, 0 <= schedule.zero_stage <= 3),
        "schedule.extra_in_flight": (
            extra,
            extra == 0 or (extra > 0 and schedule.name in DEEPENED),
        ),
        "schedule.loss_chunks": (schedule.loss_chunks, schedule.loss_chunks >= 1),
        "training.learning_rate": (training.learning_rate, 0 <= training.learning_rate < math.inf),
        "training.weight_decay": (training.weight_decay, 0 <= training.weight_decay < math.inf),
        "training.eps": (training.eps, 0 <= training.eps < math.inf),
        "training.betas": (training.betas, all(0 <= beta < 1 for beta in training.betas)),
        "training.max_grad_norm": (
            training.max_grad_norm,
            training.max_grad_norm is None or training.max_grad_norm > 0,
        ),
    }
    for name, (value, is_possible) in ranges.items():
        if not is_possible:
            raise PlanFormatError(f"field {name}: {value} is out of range", where=where)
    try:
        parse_kernels(schedule.kernels)
    except InputError as error:
        raise PlanFormatError(
            f"field schedule.kernels: {error.what}", where=where, hint=error.hint
        ) from None


def read_plan(path: str | Path) -> Plan:
    """The plan in a file."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise PlanFormatError(f"cannot read the plan: {error.strerror}", where=str(path)) from None
    return from_json(text, where=str(path))


def json_schema() -> dict[str, object]:
    """The JSON Schema of a plan."""
    return _adapter.json_schema(mode="serialization")
