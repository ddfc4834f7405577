"""Small instances for tests of what stands on the search."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.plan import Plan, TrainingPlan
from autopar.solver import Cluster, solve
from autopar.solver.instance import Instance, make_instance
from tests.solver.graphs import block_model

TRAINING = TrainingPlan(
    precision="fp32",
    optimizer="adamw",
    learning_rate=1e-3,
    weight_decay=0.1,
    betas=(0.9, 0.95),
    eps=1e-8,
    max_grad_norm=1.0,
    seed=0,
)
MODEL = block_model([("linear", 0), ("relu", 0), ("linear", 0), ("add", 0)], num_blocks=4)
FOUR = Cluster("cpu-local", gpus_per_node=4)
TWO_NODES = Cluster("cpu-local", nodes=2, gpus_per_node=2)


def instance(
    cluster: Cluster = FOUR, pin: Mapping[str, int | str] | None = None, *, batch: int = 8
) -> Instance:
    """The small model on a cluster."""
    return make_instance(
        MODEL, cluster, global_batch_size=batch, training=TRAINING, pin=dict(pin or {})
    )


def plan(
    cluster: Cluster = FOUR,
    pin: Mapping[str, int | str] | None = None,
    *,
    batch: int = 8,
    what_if: bool = False,
) -> Plan:
    """The plan of the small model on a cluster."""
    return solve(
        MODEL,
        cluster,
        global_batch_size=batch,
        training=TRAINING,
        pin=dict(pin or {}),
        what_if=what_if,
    )
