"""What is captured, ruled and run of each model, as a page of the documentation:

    python benchmarks/zoo.py > docs/reference/models.md
    python benchmarks/zoo.py llama t5     # only these, to look at

Every model of ``tests/zoo.py`` is captured with each attention, planned for a few pinned meshes and
trained for a step on ranks that are threads of this process. Loss and gradients are held against
the module itself, run by eager PyTorch on one device. The plans are for an imaginary machine with
slow cores and free links, on which work that can be divided is.
"""

from __future__ import annotations

import logging
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ir.errors import AutoparError
from autopar.ir.graph import ModelGraph
from autopar.ir.plan import Plan, TrainingPlan
from autopar.passes import lower_plan, plan_moves
from autopar.runtime.communicator import Communicator
from autopar.runtime.engine import Engine
from autopar.runtime.threads import run_mesh
from autopar.solver import Cluster, solve
from autopar.solver.coverage import coverage_of

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script finds its own folder only
from tests.zoo import ZOO, Batch, ZooModel

HARDWARE = Path(__file__).parents[1] / "solver" / "hardware" / "cpu-local.toml"
BATCH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Pinned degrees, all others 1, and the letter that the table has for them."""

    letter: str
    pin: Mapping[str, int]


def _layout(letter: str, **degrees: int) -> Layout:
    ones = {"tp": 1, "pp": 1, "dp_shard": 1, "dp_replicate": 1}
    return Layout(letter=letter, pin={**ones, **degrees})


LAYOUTS: Mapping[str, Layout] = {
    "tp 2": _layout("T", tp=2),
    "tp 4": _layout("Q", tp=4),
    "dp 2 with ZeRO 3": _layout("Z", dp_shard=2, zero_stage=3),
    "pp 2 × tp 2": _layout("P", pp=2, tp=2),
    "cp 2": _layout("C", cp=2),
    "ep 2": _layout("E", ep=2),
}
EXPERTS = ("mixtral", "qwen3_moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the table says of a model. ``refused`` has the message of each layout that was not
    run.
    """

    model: str
    attention: str
    blocks: str
    num_ops: int
    without_rule: Sequence[str]
    split: float
    sharded: float
    run: Sequence[str]
    refused: Mapping[str, str]
    worst: float
    loss: float


def main(names: Sequence[str]) -> None:
    """Print the page."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        hardware = Path(folder) / "slow.toml"
        hardware.write_text(imaginary(HARDWARE.read_text()))
        for name in names or ZOO:
            for attention in ZOO[name].attentions:
                rows.append(measure(ZOO[name], attention, str(hardware)))
                print(f"{name}, {attention}: {rows[-1]}", file=sys.stderr, flush=True)
    print(page(rows))


def imaginary(text: str) -> str:
    """Hardware on which computing is slow and communicating is free."""
    changed = {
        "hbm_bytes_per_s": "1.0e6",
        "launch_s": "1.0e-9",
        "kernel_s": "1.0e-9",
        "fp32": "1.0e6",
        "bytes_per_s": "1.0e12",
        "latency_s": "1.0e-9",
        "latency_per_rank_s": "1.0e-10",
    }
    lines: list[str] = []
    for line in text.splitlines():
        key = line.partition(" = ")[0]
        if key in changed:
            line = f'{key} = {{ value = {changed[key]}, source = "imaginary" }}'
        lines.append(line)
    return "\n".join(lines)


def measure(model: ZooModel, attention: str, hardware: str) -> Row:
    """Capture one model and run it under all layouts."""
    module = model.build(attention)
    graph = capture(module, model.inputs(), loss_fn=model.loss_fn, name=model.name)
    coverage = coverage_of(graph, Cluster(hardware))
    batch = model.inputs(BATCH, seed=1)
    module.zero_grad()
    expected = model.loss(module, batch)
    expected.backward()
    run: list[str] = []
    refused: dict[str, str] = {}
    worst = loss = sharded = 0.0
    for name, layout in LAYOUTS.items():
        if "ep" in layout.pin and model.name not in EXPERTS:
            continue
        try:
            plan = plan_for(graph, hardware, layout.pin)
            found, gradients = train(graph, plan, module, batch)
        except AutoparError as error:
            refused[name] = str(error).partition("\n")[0]
            continue
        if name == "tp 2":
            sharded = share_sharded(plan)
        run.append(name)
        worst = max(worst, worst_error(module, gradients))
        loss = max(loss, abs(found - expected.item()))
    counts = graph.multiplicity().values()
    return Row(
        model=model.name,
        attention=attention,
        blocks=" ".join(map(str, counts)),
        num_ops=len({use.op for use in coverage.uses}),
        without_rule=sorted({use.op for use in coverage.uses if use.rule is None}),
        split=coverage.split_flops / coverage.matmul_flops,
        sharded=sharded,
        run=run,
        refused=refused,
        worst=worst,
        loss=loss,
    )


def plan_for(graph: ModelGraph, hardware: str, pin: Mapping[str, int]) -> Plan:
    """The best plan with these degrees."""
    degrees = [pin.get(axis, 1) for axis in ("tp", "pp", "dp_shard", "cp", "ep")]
    num_ranks = math.prod(degrees)
    return solve(
        graph,
        Cluster(hardware, gpus_per_node=num_ranks),
        global_batch_size=BATCH,
        training=TrainingPlan(
            precision="fp32",
            optimizer="sgd",
            learning_rate=0.1,
            weight_decay=0.0,
            betas=(0.9, 0.95),
            eps=1e-8,
            max_grad_norm=None,
            seed=0,
        ),
        pin=dict(pin),
        describe_moves=plan_moves,
    )


def share_sharded(plan: Plan) -> float:
    """The part of all matrices' entries that the plan shards over the tensor axis."""
    axis = plan.layout_axes.index("tp")
    counts = {True: 0, False: 0}
    for parameter in plan.parameters.values():
        if len(parameter.shape) > 1:
            counts[parameter.placement[axis].startswith("S")] += math.prod(parameter.shape)
    return counts[True] / sum(counts.values())


def train(
    graph: ModelGraph, plan: Plan, module: nn.Module, batch: Batch
) -> tuple[float, Mapping[str, Tensor]]:
    """Loss and gradients of a step on thread ranks."""
    program = lower_plan(graph, plan)
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def rank(communicator: Communicator) -> tuple[float, Mapping[str, Tensor]]:
        engine = Engine(program, graph, plan, communicator, keep_gradients=True)
        engine.load_parameters(weights)
        result = engine.train_step(batch)
        return result.loss, engine.full_gradients()

    return run_mesh(plan.device_mesh(), rank)[0]


def worst_error(module: nn.Module, gradients: Mapping[str, Tensor]) -> float:
    """The largest ‖Δg‖ / max(‖g‖, 1e-3 · largest ‖g‖) of all parameters."""
    expected = {
        name: parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    floor = 1e-3 * max(float(gradient.norm()) for gradient in expected.values())
    return max(
        float((gradients[name] - gradient).norm()) / max(float(gradient.norm()), floor)
        for name, gradient in expected.items()
    )


def page(rows: Sequence[Row]) -> str:
    """The page in markdown."""
    meshes = ", ".join(f"**{layout.letter}** {name}" for name, layout in LAYOUTS.items())
    lines = [
        "# Models",
        "",
        "Written by `python benchmarks/zoo.py > docs/reference/models.md`; the models are those of",
        "`tests/zoo.py`: each family at 2 to 4 layers with random weights, in fp32.",
        "",
        "- *blocks*: how many blocks of each kind the captured model has",
        "- *ops*: distinct ops; *no rule*: those of them that would be replicated",
        "- *split*: the share of matmul FLOPs that rules can split at tp 2",
        "- *sharded*: the share of the entries of all matrices that the plan for tp 2 shards",
        f"- *run*: meshes on which a step of {BATCH} sequences ran on simulated ranks, under the",
        "  solver's plan for slow cores and free links, so that what can be divided is:",
        f"  {meshes}",
        "- *Δg*: the worst of ‖Δg‖ / max(‖g‖, 1e-3 · largest ‖g‖) over all parameters and meshes,",
        "  and *Δloss* that of the loss, against the module run by eager PyTorch on one device",
        "",
        "| model | attention | blocks | ops | no rule | split | sharded | run | Δg | Δloss |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        run = " ".join(LAYOUTS[name].letter for name in row.run)
        lines.append(
            f"| {row.model} | {row.attention} | {row.blocks} | {row.num_ops} "
            f"| {len(row.without_rule)} | {row.split:.1%} | {row.sharded:.0%} | {run} "
            f"| {row.worst:.1e} | {row.loss:.1e} |"
        )
    notes = [
        *(f"- {row.model}: `{op}` has no rule" for row in rows for op in row.without_rule),
        *(
            f"- {row.model}, {row.attention}, not {name}: {why}"
            for row in rows
            for name, why in row.refused.items()
        ),
    ]
    if notes:
        lines += ["", "Replicated, or refused at plan time:", "", *dict.fromkeys(notes)]
    lines += ["", f"torch {torch.__version__}, transformers {transformers.__version__}."]
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
