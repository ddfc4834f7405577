"""Runs as the planner sees them: captured, laid out and scheduled once, so that a step can be
predicted again under other hardware.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopar.api.planning import capture_request
from autopar.api.request import Request, make_request
from autopar.estimation import ModelShape, cluster_of, open_shape, pins_of
from autopar.ir.mesh import MESH_AXES
from autopar.ir.plan import TrainingPlan
from autopar.ir.schedule import CompactSchedule
from autopar.solver import Cluster
from autopar.solver.candidates import Candidate
from autopar.solver.costs.memory import Itemsizes, StageContents, itemsizes
from autopar.solver.facts import BlockCosts, Floats, layout_costs
from autopar.solver.instance import divisible
from autopar.solver.layout.check import kind_costs
from autopar.solver.layout.model_facts import ModelFacts, model_facts
from autopar.solver.layout.problem import Problem
from autopar.solver.pins import AXES_PIN
from autopar.solver.refiner import Refiner
from autopar.solver.settings import layout_coster, layout_problem
from autopar.solver.solved import Solved
from autopar.solver.space import candidates
from benchmarks.fit.measured import Measured
from benchmarks.fit.terms import Piece, Terms, recorders, terms_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KindTerms:
    """What a block of a kind computes and sends in a micro-batch, and how many kernels that is;
    ``again`` is what backward computes again.
    """

    forward: Terms
    backward: Terms
    again: Terms
    forward_kernels: float
    backward_kernels: float
    again_kernels: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """A layout's blocks.

    Attributes:
        kinds: By index of the kind.
        kind_of: The kind of each block.
        step: Reductions once a step: how often each piece is in each block.
        costs: Under the hardware file; its seconds are made anew.
    """

    kinds: tuple[KindTerms, ...]
    kind_of: tuple[int, ...]
    step: tuple[tuple[Piece, Floats], ...]
    costs: BlockCosts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A measured run, laid out and scheduled.

    Attributes:
        segments: Stage, first and last block of each.
        contents: What a rank of each stage holds.
        step_s: What the planner predicts under the hardware file.
    """

    measured: Measured
    cluster: Cluster
    candidate: Candidate
    sizes: Itemsizes
    blocks: Blocks
    segments: tuple[tuple[int, int, int], ...]
    schedule: CompactSchedule
    contents: tuple[StageContents, ...]
    step_s: float


def by_shape(measured: Iterable[Measured]) -> list[list[Measured]]:
    """Runs by model, those with the most runs first: each can be laid out by a process."""
    groups: dict[ModelShape, list[Measured]] = {}
    for run in measured:
        groups.setdefault(run.row.shape, []).append(run)
    return sorted(groups.values(), key=len, reverse=True)


def lay_out(measured: Sequence[Measured]) -> list[Run]:
    """Runs of one model, from its capture.

    Raises:
        AutoparError: A row's layout cannot be estimated.
    """
    facts: dict[str, ModelFacts] = {}
    searches: dict[tuple[str, TrainingPlan], _Search] = {}
    blocks: dict[tuple[object, ...], Blocks] = {}
    found = []
    for run in measured:
        request = _request(run)
        precision = request.training.precision
        if precision not in facts:
            facts[precision] = model_facts(capture_request(request))
        key = (request.cluster.fingerprint, request.training)
        if key not in searches:
            searches[key] = _Search(facts[precision], request, blocks)
        found.append(searches[key].run(run, request))
    return found


def _request(run: Measured) -> Request:
    row = run.row
    return make_request(
        open_shape(row.shape),
        cluster_of(row),
        global_batch_size=row.global_batch,
        seq_len=row.shape.seq,
        pin=pins_of(row),
    )


class _Search:
    """What ``Estimator`` asks, and the terms of the layouts that it finds."""

    def __init__(
        self, facts: ModelFacts, request: Request, blocks: dict[tuple[object, ...], Blocks]
    ) -> None:
        self.facts, self.cluster = facts, request.cluster
        self.sizes = itemsizes(request.training)
        self.divisible = divisible(facts, request.seq_len)
        self.refiner = Refiner(facts, request.cluster, self.sizes)
        self.blocks = blocks  # of all clusters

    def run(self, measured: Measured, request: Request) -> Run:
        (candidate,) = candidates(
            self.cluster,
            global_batch_size=request.global_batch_size,
            model=self.divisible,
            pin={AXES_PIN: ",".join(MESH_AXES), **request.pin},
        )
        solved = self.refiner.solve_anyway(candidate)
        stager = solved.stager
        return Run(
            measured=measured,
            cluster=self.cluster,
            candidate=candidate,
            sizes=self.sizes,
            blocks=self._blocks(solved),
            segments=solved.segments,
            schedule=solved.schedule,
            contents=tuple(stager.contents(stage, solved.cuts) for stage in range(candidate.pp)),
            step_s=solved.step_s,
        )

    def _blocks(self, solved: Solved) -> Blocks:
        candidate, cluster = solved.candidate, self.cluster
        inside = candidate.tp <= cluster.gpus_per_node  # what blocks send knows no network
        key = (
            cluster.hardware.name if inside else cluster.fingerprint,
            cluster.gpus_per_node,
            self.sizes,
            candidate.tp,
            candidate.micro_batch_size,
            candidate.way,
            candidate.recompute,
        )
        if key not in self.blocks:
            self.blocks[key] = blocks_of(self.facts, self.cluster, self.sizes, solved)
        return self.blocks[key]


def blocks_of(facts: ModelFacts, cluster: Cluster, sizes: Itemsizes, solved: Solved) -> Blocks:
    """The blocks of a solved layout, by what they are made of."""
    candidate = solved.candidate
    coster = layout_coster(
        facts,
        cluster,
        tp=candidate.tp,
        micro_batch_size=candidate.micro_batch_size,
        reduce_itemsize=sizes.reduce,
        way=candidate.way,
    )
    kernels, links = recorders(cluster)
    problem = layout_problem(
        facts,
        solved.setting.axes,
        dataclasses.replace(coster, kernels=kernels, links=links),
        candidate.layout_strides,
        cp=candidate.cp,
        ep=candidate.ep,
        way=candidate.way,
    )
    launch_s = cluster.hardware.chip.launch_s
    kinds = kind_costs(problem, solved.solution)
    order = {name: number for number, name in enumerate(problem.kinds)}
    return Blocks(
        kinds=tuple(
            KindTerms(
                forward=terms_of(kind.forward_s),
                backward=terms_of(kind.backward_s - kind.again_s),
                again=terms_of(kind.again_s),
                forward_kernels=kind.forward_launch_s / launch_s,
                backward_kernels=(kind.backward_launch_s - kind.again_launch_s) / launch_s,
                again_kernels=kind.again_launch_s / launch_s,
            )
            for kind in kinds
        ),
        kind_of=tuple(order[block.kind] for block in facts.model.blocks),
        step=tuple(_step_terms(facts, problem, solved)),
        costs=solved.stager.costs,
    )


def _step_terms(
    facts: ModelFacts, problem: Problem, solved: Solved
) -> Iterator[tuple[Piece, Floats]]:
    """Costs of blocks are linear in ``step_s`` of classes: asked for one piece at a time."""
    kinds, states = kind_costs(solved.setting.problem, solved.solution), solved.solution.states
    pieces: dict[Piece, None] = {}
    for found, state in zip(problem.classes, states, strict=True):
        if state >= 0:
            pieces.update(dict.fromkeys(terms_of(found.step_s[state])))
    for piece in pieces:
        classes = tuple(
            dataclasses.replace(
                found,
                step_s=tuple(terms_of(seconds).get(piece, 0.0) for seconds in found.step_s),
            )
            for found in problem.classes
        )
        only = dataclasses.replace(problem, classes=classes)
        yield piece, layout_costs(facts, only, kinds, {}, states).step_s
