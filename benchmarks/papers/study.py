"""A model on a cluster, of which many pinned layouts are estimated."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from autopar.api.planning import capture_model
from autopar.capture.sources import ModelSource
from autopar.estimation import ModelShape, open_shape
from autopar.ir.plan import PrecisionName, RecomputeName, ScheduleName, TrainingPlan
from autopar.solver import Cluster
from autopar.solver.estimate import Estimate, Estimator
from autopar.solver.layout.model_facts import ModelFacts, model_facts
from autopar.solver.solved import Solved

FLASH = "flash_attention2"
FUSED = "flash_attention2 + fused norms"
GIB = 2**30
WAITING = "waiting for other stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All decisions of a step.

    Of the ``dp`` data ranks, ``replicas`` groups hold the same shards under ZeRO. ZeRO over one
    rank is stage 0.
    """

    tp: int = 1
    pp: int = 1
    dp: int
    replicas: int = 1
    micro_batch_size: int = 1
    recompute: RecomputeName = "none"
    sequence_parallel: bool = False
    zero_stage: int = 1
    kernel: str = FUSED
    schedule: ScheduleName = "1f1b"
    virtual_stages: int = 1

    def pins(self) -> dict[str, int | str]:
        """As the planner takes them."""
        zero = self.zero_stage if self.dp > self.replicas else 0
        return {
            "tp": self.tp,
            "pp": self.pp,
            "dp_replicate": self.dp if zero == 0 else self.replicas,
            "dp_shard": 1 if zero == 0 else self.dp // self.replicas,
            "micro_batch_size": self.micro_batch_size,
            "zero_stage": zero,
            "recompute": self.recompute,
            "schedule": self.schedule,
            "virtual_stages": self.virtual_stages,
            "sequence_parallel": int(self.sequence_parallel and self.tp > 1),
            "kernel": self.kernel,
            "cuts": "even",
            "loss_chunks": 1,
            "offload_optimizer": 0,
        }

    @property
    def num_gpus(self) -> int:
        """Ranks of all axes."""
        return self.tp * self.pp * self.dp

    @property
    def words(self) -> str:
        """The mesh."""
        axes = [f"{name} {n}" for name, n in (("tp", self.tp), ("pp", self.pp)) if n > 1]
        return " × ".join([*axes, f"dp {self.dp}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A layout and its estimate."""

    layout: Layout
    estimate: Estimate

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.estimate.step_s

    @property
    def mfu(self) -> float:
        """Share of the peak."""
        return self.estimate.prediction.mfu

    @property
    def gib(self) -> float:
        """Of the fullest rank."""
        return self.estimate.peak_bytes / GIB

    def causes(self) -> dict[str, float]:
        """Seconds by cause, of the ranks of the stage that waits least for others."""
        ranks = self.estimate.prediction.ranks
        busiest = min(ranks, key=lambda rank: rank.seconds_by_cause[WAITING])
        return dict(busiest.seconds_by_cause)


class Study:
    """A model on a cluster, trained in batches of ``global_batch_size`` sequences."""

    def __init__(
        self,
        facts: ModelFacts,
        cluster: Cluster,
        *,
        global_batch_size: int,
        training: TrainingPlan | None = None,
    ) -> None:
        self.facts, self.cluster, self.global_batch_size = facts, cluster, global_batch_size
        self.training = training or numerics()
        self.estimator = Estimator(facts, cluster, training=self.training)
        self._known: dict[Layout, Found] = {}

    def __call__(self, layout: Layout) -> Found:
        """The estimate of ``layout``."""
        if layout not in self._known:
            estimate = self.estimator(layout.pins(), global_batch_size=self.global_batch_size)
            self._known[layout] = Found(layout=layout, estimate=estimate)
        return self._known[layout]

    def solved(self, layout: Layout) -> Solved:
        """``layout`` with its blocks' costs and its schedule."""
        return self.estimator.refiner.solve_anyway(self(layout).estimate.candidate)


def numerics(gradients: PrecisionName = "bf16") -> TrainingPlan:
    """bf16 compute with fp32 master weights and AdamW; gradients are kept and sent in
    ``gradients``.
    """
    return TrainingPlan(
        precision="bf16",
        gradient_dtype=gradients,
        reduce_dtype=gradients,
        optimizer="adamw",
        learning_rate=1e-4,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        max_grad_norm=1.0,
        seed=0,
    )


@functools.lru_cache(maxsize=4)  # a trillion parameters or a few lengths of a model
def shape_facts(shape: ModelShape) -> ModelFacts:
    """A model of these sizes, captured once."""
    return source_facts(open_shape(shape), shape.seq)


def source_facts(source: ModelSource, seq_len: int) -> ModelFacts:
    """A model, captured in bf16."""
    return model_facts(capture_model(source, seq_len, "bf16"))
