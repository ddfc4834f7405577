"""What a pinned layout takes: the planner's own costs, schedule and simulator, and no choice."""

from __future__ import annotations

from dataclasses import dataclass, fields

from autopar.ir.errors import InputError
from autopar.ir.graph import ModelGraph
from autopar.ir.mesh import MESH_AXES
from autopar.ir.plan import Prediction, TrainingPlan
from autopar.solver.candidates import Candidate
from autopar.solver.costs.memory import itemsizes
from autopar.solver.hardware import Cluster
from autopar.solver.instance import divisible, sequence_length
from autopar.solver.layout.model_facts import ModelFacts, model_facts
from autopar.solver.pins import AXES_PIN, GROUP_PIN, Pins
from autopar.solver.predict import predict
from autopar.solver.refiner import Refiner
from autopar.solver.space import candidates

_UNLESS_PINNED: Pins = {
    "virtual_stages": 1,
    "loss_chunks": 1,
    "offload_optimizer": 0,
    "offload_activations": 0,
    "extra_in_flight": 0,
    AXES_PIN: ",".join(MESH_AXES),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a step of a layout takes, whether or not it fits into memory.

    Attributes:
        candidate: The layout.
        prediction: As of a plan: seconds and bytes of each stage's ranks, by cause.
        reserved_bytes: What tools show of the fullest rank: with what its allocator holds beside.
    """

    candidate: Candidate
    prediction: Prediction
    reserved_bytes: int

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.prediction.step_s

    @property
    def peak_bytes(self) -> int:
        """Bytes of the fullest rank."""
        return self.prediction.fullest.peak_bytes

    @property
    def usable_bytes(self) -> int:
        """Bytes that a rank has."""
        return self.prediction.usable_bytes

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has room."""
        return self.peak_bytes <= self.usable_bytes


class Estimator:
    """Estimates layouts of one model on one cluster; what layouts share is worked out once.

    Args:
        model: The captured model, or its facts.
        cluster: The GPUs.
        training: Numerics and optimizer.
        seq_len: Tokens per sequence; default: the second dim of the model's inputs.
    """

    def __init__(
        self,
        model: ModelGraph | ModelFacts,
        cluster: Cluster,
        *,
        training: TrainingPlan,
        seq_len: int | None = None,
    ) -> None:
        facts = model_facts(model) if isinstance(model, ModelGraph) else model
        self.facts, self.cluster, self.training = facts, cluster, training
        self.seq_len = seq_len or sequence_length(facts.model)
        self.divisible = divisible(facts, self.seq_len)
        self.refiner = Refiner(facts, cluster, itemsizes(training))

    def __call__(self, pin: Pins, *, global_batch_size: int) -> Estimate:
        """The estimate of the layout that ``pin`` describes; without virtual stages if it says
        nothing of them.

        Raises:
            InputError: A pin cannot hold, or something is left open.
        """
        as_given: Pins = {}
        if self.cluster.is_mixed:
            order = ",".join(group.name for group in self.cluster.groups)
            as_given = {"shares": "equal", GROUP_PIN: order}
        found = candidates(
            self.cluster,
            global_batch_size=global_batch_size,
            model=self.divisible,
            pin={**_UNLESS_PINNED, **as_given, **pin},
        )
        only = found[0]
        names = [
            field.name
            for field in fields(Candidate)
            if len({getattr(candidate, field.name) for candidate in found}) > 1
            and field.name != "num_micro_batches"
        ]
        if only.placements:
            names += ["dp_replicate", "dp_shard"]
        if "recompute" not in pin:
            names.append("recompute")
        if names:
            raise InputError(
                f"the layout leaves {', '.join(names)} open: {len(found)} layouts are like it",
                hint="pin them, too, or let autopar.plan choose",
            )
        solved = self.refiner.solve(only) or self.refiner.solve_anyway(only)
        prediction = predict(
            solved,
            self.facts.model,
            self.cluster,
            self.training,
            global_batch_size=global_batch_size,
            seq_len=self.seq_len,
        )
        peak = prediction.fullest.peak_bytes
        memory = solved.stager.sites.memory[prediction.fullest.stage]
        held = int((peak - memory.context_bytes) * memory.reserve)
        return Estimate(
            candidate=only,
            prediction=prediction,
            reserved_bytes=max(peak, min(peak + held, prediction.usable_bytes)),
        )


def estimate(
    model: ModelGraph | ModelFacts,
    cluster: Cluster,
    *,
    global_batch_size: int,
    training: TrainingPlan,
    seq_len: int | None = None,
    pin: Pins,
) -> Estimate:
    """The estimate of one layout; see ``Estimator``."""
    estimator = Estimator(model, cluster, training=training, seq_len=seq_len)
    return estimator(pin, global_batch_size=global_batch_size)
