"""Tiny models with plans for them, and what one device computes: the runtime's oracle."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autopar.capture import capture, run_reference
from autopar.ir.graph import ModelGraph, TensorInfo, ValueId
from autopar.ir.kernels import DEFAULT_KERNELS
from autopar.ir.mesh import DATA_AXIS, MESH_AXES, Mesh
from autopar.ir.placement import INVARIANT, State
from autopar.ir.plan import (
    BatchPlan,
    Plan,
    PrecisionName,
    RecomputeName,
    ScheduleName,
    SchedulePlan,
    SegmentPlan,
    TrainingPlan,
)
from autopar.ir.precision import DTYPES
from autopar.ir.zero_stages import parse_zero_stages
from tests.models import next_token_loss, tiny_gpt2, tiny_llama, tiny_transformer, token_batch
from tests.passes.layouts import cheapest, choose_layout, megatron
from tests.plans import bare_plan

GLOBAL_BATCH = 8
HAND_WRITTEN = ("transformer", "frozen")
"""``frozen`` is the same model with embeddings and head that are not trained.

``dropout`` is GPT-2 with dropout everywhere, attention included.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One way to run a tiny model.

    ``modular`` puts segment k on stage k mod p. Parameters whose names contain ``complete`` are
    used ``I`` on the data axis: each data rank has the whole gradient. ``zero_stages`` are those of
    blocks that have not ``zero_stage``, as text.
    """

    name: str = "llama"
    layers: int = 2
    mesh: Mesh = field(default_factory=Mesh)
    num_micro_batches: int = 2
    schedule: ScheduleName = "1f1b"
    zero_stage: int = 0
    recompute: RecomputeName = "none"
    kernels: str = DEFAULT_KERNELS
    precision: PrecisionName = "fp32"
    gradient_dtype: PrecisionName | None = None
    reduce_dtype: PrecisionName | None = None
    optimizer: str = "sgd"
    max_grad_norm: float | None = None
    modular: bool = False
    sequence: bool = False
    complete: str | None = None
    extra_in_flight: int = 0
    loss_chunks: int = 1
    offload_optimizer: bool = False
    offloaded_blocks: tuple[int, ...] = ()
    zero_stages: str = ""
    gathers_again: bool = False

    def __str__(self) -> str:
        degrees = "".join(
            f"{axis}{self.mesh.size(axis)}" for axis in MESH_AXES if self.mesh.size(axis) > 1
        )
        modular = "-modular" if self.modular else ""
        return (
            f"{self.name}-{degrees}-{self.schedule}{modular}-zero{self.zero_stage}-{self.recompute}"
            + f"-{self.loss_chunks}chunks" * (self.loss_chunks > 1)
            + "-offloaded" * self.offload_optimizer
            + "".join(f"-away{block}" for block in self.offloaded_blocks)
            + f"-{self.zero_stages}" * bool(self.zero_stages)
            + "-gathers" * self.gathers_again
        )


def make_module(name: str, layers: int, precision: PrecisionName) -> nn.Module:
    """The model with real weights; in float64 for proofs, else in float32."""
    if name == "llama":
        module = tiny_llama(layers)[0]
    elif name in ("gpt2", "dropout"):
        module = tiny_gpt2(layers, dropout=0.2 if name == "dropout" else 0.0)[0]
    else:
        module = tiny_transformer(layers)[0]
    if name == "frozen":
        for path, parameter in module.named_parameters():
            parameter.requires_grad_(path.startswith(("layers", "norm")))
    return module.double() if precision == "float64" else module


@functools.cache
def initial_parameters(name: str, layers: int, precision: PrecisionName) -> dict[str, Tensor]:
    """The module's weights. Threads must not make modules: they share the random generator."""
    module = make_module(name, layers, precision)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def make_batch(name: str, *, seed: int, size: int = GLOBAL_BATCH) -> dict[str, Tensor]:
    """A global batch."""
    batch = token_batch(size, seed=seed)
    if name in HAND_WRITTEN:
        return {"tokens": batch["input_ids"], "targets": batch["labels"]}
    return batch


@functools.cache
def make_model(name: str, layers: int, precision: PrecisionName) -> ModelGraph:
    """The captured model."""
    module = make_module(name, layers, precision)
    return capture(
        module,
        make_batch(name, seed=0, size=2),
        loss_fn=next_token_loss if name in HAND_WRITTEN else None,
        compute_dtype=DTYPES[precision],
    )


def make_plan(setup: Setup) -> Plan:
    """A plan with Megatron's layout and one block per segment; nothing is predicted."""
    model = make_model(setup.name, setup.layers, setup.precision)
    mesh, num_blocks = setup.mesh, len(model.blocks)
    gradient_dtype = setup.gradient_dtype or ("float64" if setup.precision == "float64" else "fp32")
    micro_batch_size = GLOBAL_BATCH // (mesh.batch_ranks * setup.num_micro_batches)
    pinned = megatron(model, sequence=setup.sequence)

    def pin(value: ValueId, tensor: TensorInfo, axis: str) -> State:
        if setup.complete is not None and setup.complete in value.name and axis == DATA_AXIS:
            return INVARIANT
        return pinned(value, tensor, axis)

    batch = micro_batch_size * mesh.batch_ranks
    layout = choose_layout(model, mesh, batch=batch, pin=pin, choose=cheapest)
    stages = [
        block % mesh.pp if setup.modular else block * mesh.pp // num_blocks
        for block in range(num_blocks)
    ]
    return bare_plan(
        model,
        layout,
        mesh=mesh,
        batch=BatchPlan(
            global_batch_size=GLOBAL_BATCH,
            micro_batch_size=micro_batch_size,
            num_micro_batches=setup.num_micro_batches,
        ),
        schedule=SchedulePlan(
            name=setup.schedule,
            recompute=setup.recompute,
            recomputed_blocks=(1,) if setup.recompute == "blocks" else (),
            recomputed_by_op=(2,) if setup.recompute == "blocks" else (),
            gathered_again=tuple(range(2, num_blocks - 1)) if setup.gathers_again else (),
            zero_stage=setup.zero_stage,
            kernels=setup.kernels,
            extra_in_flight=setup.extra_in_flight,
            loss_chunks=setup.loss_chunks,
            offload_optimizer=setup.offload_optimizer,
            offloaded_blocks=setup.offloaded_blocks,
            zero_stages=parse_zero_stages(setup.zero_stages) if setup.zero_stages else {},
        ),
        segments=[
            SegmentPlan(stage=stage, first_block=block, last_block=block)
            for block, stage in enumerate(stages)
        ],
        training=TrainingPlan(
            precision=setup.precision,
            gradient_dtype=gradient_dtype,
            reduce_dtype=setup.reduce_dtype or gradient_dtype,
            optimizer=setup.optimizer,  # type: ignore[arg-type]
            learning_rate=0.1 if setup.optimizer == "sgd" else 1e-2,
            weight_decay=0.0 if setup.optimizer == "sgd" else 0.1,
            betas=(0.9, 0.95),
            eps=1e-8,
            max_grad_norm=setup.max_grad_norm,
            seed=0,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What one device computes in some steps: losses, norms, the first step's gradients, final
    parameters.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


@functools.cache
def one_device(
    name: str,
    layers: int,
    precision: PrecisionName,
    optimizer: str,
    max_grad_norm: float | None,
    num_steps: int,
) -> Expected:
    """Train the user's module itself, whole batches at a time.

    In float64 the captured model is run instead: Hugging Face's casts to float32 whatever its
    weights are. So it is with dropout, whose masks are then those of the definition.
    """
    module = make_module(name, layers, precision)
    parameters = [p for p in module.parameters() if p.requires_grad]
    stepper: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.1)
    if optimizer == "adamw":
        stepper = torch.optim.AdamW(
            parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        )
    losses: list[float] = []
    grad_norms: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(num_steps):
        batch = make_batch(name, seed=step)
        if precision == "float64" or name == "dropout":
            model = make_model(name, layers, precision)
            total, weight = run_reference(
                model, dict(module.named_parameters()), batch, seed=0, step=step
            )
            assert weight is not None
            loss = total / weight
        else:
            loss = module_loss(module, name, batch)
        loss.backward()
        if step == 0:
            found = ((n, p.grad) for n, p in module.named_parameters())
            gradients = {n: gradient.clone() for n, gradient in found if gradient is not None}
        limit = float("inf") if max_grad_norm is None else max_grad_norm
        grad_norms.append(torch.nn.utils.clip_grad_norm_(parameters, limit).item())
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    return Expected(
        losses=tuple(losses),
        grad_norms=tuple(grad_norms),
        gradients=gradients,
        parameters={n: p.detach().clone() for n, p in module.named_parameters()},
    )


def module_loss(module: nn.Module, name: str, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss of the user's model."""
    if name in HAND_WRITTEN:
        return next_token_loss(module(batch["tokens"]), batch)
    return module(**batch).loss


def expected_of(setup: Setup, num_steps: int) -> Expected:
    """What one device computes for ``setup``; 16 bits are compared with float32."""
    half = setup.precision in ("bf16", "fp16")
    precision: PrecisionName = "fp32" if half else setup.precision
    return one_device(
        setup.name, setup.layers, precision, setup.optimizer, setup.max_grad_norm, num_steps
    )
