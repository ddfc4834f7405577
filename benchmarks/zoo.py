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
from tests.zoo import ZOO, Batch, ZooModel

HARDWARE = Path(__file__).parents[1] / "solver" / "hardware" / "cpu-local.toml"
BATCH = 4
ONE = {"tp": 1, "pp": 1, "dp_shard": 1, "dp_replicate": 1}
LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "tp 2": {**ONE, "tp": 2},
    "tp 4": {**ONE, "tp": 4},
    "dp 2, ZeRO 3": {**ONE, "dp_shard": 2, "zero_stage": 3},
    "pp 2 × tp 2": {**ONE, "pp": 2, "tp": 2},
    "cp 2": {**ONE, "cp": 2},
    "ep 2": {**ONE, "ep": 2},
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
    worst = loss = 0.0
    for name, pin in LAYOUTS.items():
        if "ep" in pin and model.name not in EXPERTS:
            continue
        try:
            found, gradients = train(graph, plan_for(graph, hardware, pin), module, batch)
        except AutoparError as error:
            refused[name] = str(error).partition("\n")[0]
            continue
        run.append(name)
        worst = max(worst, worst_error(module, gradients))
        loss = max(loss, abs(found - expected.item()))
    counts = graph.multiplicity().values()
    return Row(
        model=model.name,
        attention=attention,
        blocks=" + ".join(map(str, counts)),
        num_ops=len({use.op for use in coverage.uses}),
        without_rule=sorted({use.op for use in coverage.uses if use.rule is None}),
        split=coverage.split_flops / coverage.matmul_flops,
        run=run,
        refused=refused,
        worst=worst,
        loss=loss,
    )


def plan_for(graph: ModelGraph, hardware: str, pin: Mapping[str, int]) -> Plan:
    """The best plan with these degrees."""
    degrees = [pin.get(axis, 1) for axis in ("tp", "pp", "dp_shard", "cp", "ep")]
    num_ranks = int(torch.tensor(degrees).prod())
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
    lines = [
        "# Models",
        "",
        "Written by `python benchmarks/zoo.py > docs/reference/models.md`; the models are those of",
        "`tests/zoo.py`: each family at 2 to 4 layers with random weights, in fp32.",
        "",
        "- *blocks*: how many blocks of each kind the captured model has",
        "- *ops*: distinct ops, and how many of them have no rule and would be replicated",
        "- *split*: the share of matmul FLOPs that rules can split at tp 2",
        f"- *layouts run*: meshes on which a step of {BATCH} sequences ran on simulated ranks,",
        "  under the solver's plan for slow cores and free links, so that what can be divided is",
        "- *errors*: the worst of ‖Δg‖ / max(‖g‖, 1e-3 · largest ‖g‖) over all parameters and",
        "  layouts, and the worst difference of the loss, against the module run by eager PyTorch",
        "",
        "| model | attention | blocks | ops | without rule | split | layouts run | gradient error "
        "| loss error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        without = ", ".join(f"`{op}`" for op in row.without_rule) or "0"
        lines.append(
            f"| {row.model} | {row.attention} | {row.blocks} | {row.num_ops} | {without} | "
            f"{row.split:.1%} | {'; '.join(row.run)} | {row.worst:.1e} | {row.loss:.1e} |"
        )
    refused = [(row, name, why) for row in rows for name, why in row.refused.items()]
    if refused:
        lines += ["", "Refused at plan time:", ""]
        lines += [f"- {row.model}, {row.attention}, {name}: {why}" for row, name, why in refused]
    lines += ["", f"torch {torch.__version__}, transformers {transformers.__version__}."]
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
