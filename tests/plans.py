"""Plans that no solver made: decisions as a test wants them, and nothing predicted."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import ModelGraph
from autopar.ir.layout import Layout
from autopar.ir.mesh import LAYOUT_AXES, Mesh
from autopar.ir.plan import (
    BatchPlan,
    Certificate,
    ClusterRef,
    MeshPlan,
    ModelRef,
    ParameterPlan,
    Plan,
    Prediction,
    SchedulePlan,
    SegmentPlan,
    TrainingPlan,
    layout_text,
)

SGD = TrainingPlan(
    precision="fp32",
    gradient_dtype="fp32",
    reduce_dtype="fp32",
    optimizer="sgd",
    learning_rate=0.1,
    weight_decay=0.0,
    betas=(0.9, 0.95),
    eps=1e-8,
    max_grad_norm=None,
    seed=0,
)


def bare_plan(
    model: ModelGraph,
    layout: Layout,
    *,
    mesh: Mesh,
    batch: BatchPlan,
    schedule: SchedulePlan,
    segments: Sequence[SegmentPlan],
    training: TrainingPlan = SGD,
) -> Plan:
    """A plan of these decisions, for ranks of this machine."""
    return Plan(
        model=ModelRef(name=model.name, source=None, seq_len=16, num_parameters=0, fingerprint=""),
        cluster=ClusterRef(
            hardware="cpu-local",
            nodes=1,
            gpus_per_node=mesh.num_ranks,
            device="cpu",
            backend="gloo",
            fingerprint="",
        ),
        mesh=MeshPlan.of(mesh),
        batch=batch,
        schedule=schedule,
        training=training,
        pins={},
        parameters={
            name: ParameterPlan(
                names=parameter.names,
                shape=parameter.shape,
                dtype=str(parameter.dtype),
                requires_grad=parameter.requires_grad,
                placement=("R",) * len(LAYOUT_AXES),  # only read: the layout decides
                stages=(),
            )
            for name, parameter in model.parameters.items()
        },
        segments=tuple(segments),
        layout_axes=LAYOUT_AXES,
        layout=layout_text(layout, LAYOUT_AXES),
        moves=(),
        replicated_ops=(),
        certificate=Certificate(
            status="feasible",
            objective_s=1.0,
            bound_s=1.0,
            gap=0.0,
            solve_s=0.0,
            num_candidates=1,
            num_solved=1,
            statement="",
        ),
        prediction=Prediction(
            step_s=1.0, mfu=0.0, tokens_per_s=0.0, model_flops=0.0, usable_bytes=0, ranks=()
        ),
        alternatives=(),
    )
