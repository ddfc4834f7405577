"""Seconds of capturing and rewriting by depth: `python benchmarks/capture.py`.

Llama-3-70B at 20, 40, 80 and 160 layers, built on the meta device, captured in bf16 at 8192 tokens,
and lowered to the local graphs of one rank of tensor 8 × data 8 under the layout that the solver
chooses for the smallest. Target: at 80 layers both together under 10 s on 2 quiet cores. Rewriting
follows the number of kinds of blocks, not of layers, and capture the layers only where each has to
be named. CPU seconds are printed beside those on the clock: other work on the machine shows.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from autopar import Cluster, plan
from autopar.capture import capture, open_model
from autopar.ir.graph import ModelGraph
from autopar.ir.plan import Plan
from autopar.passes import lower

CONFIG = Path(__file__).parents[1] / "examples" / "configs" / "llama-3-70b" / "config.json"
DEPTHS = (20, 40, 80, 160)
SEQ_LEN, TP, DP = 8192, 8, 8

Result = TypeVar("Result")


def main() -> None:
    """Print a line for each depth."""
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )
    with tempfile.TemporaryDirectory() as folder:
        configs = {layers: write_config(Path(folder) / str(layers), layers) for layers in DEPTHS}
        chosen = plan(
            configs[DEPTHS[0]],
            Cluster("a100-80gb", nodes=8),
            global_batch_size=64,
            seq_len=SEQ_LEN,
            pin={"pp": 1, "tp": TP, "dp_shard": DP, "dp_replicate": 1, "micro_batch_size": 1},
        )
        capture_config(configs[DEPTHS[0]])  # imports, caches
        first: list[float] = []
        for layers, config in configs.items():
            graph, captured_s, captured_cpu_s = timed(functools.partial(capture_config, config))
            _, rewritten_s, rewritten_cpu_s = timed(functools.partial(rewrite, graph, chosen))
            first = first or [captured_cpu_s, rewritten_cpu_s]
            print(
                f"{layers:4} layers, {len(graph.kinds)} kinds: build and capture "
                f"{captured_s:5.2f} s (CPU {captured_cpu_s:5.2f} s, "
                f"{captured_cpu_s / first[0]:.2f} ×), rewriting {rewritten_s:5.2f} s "
                f"(CPU {rewritten_cpu_s:5.2f} s, {rewritten_cpu_s / first[1]:.2f} ×), "
                f"together {captured_s + rewritten_s:5.2f} s",
                flush=True,
            )


def write_config(folder: Path, layers: int) -> Path:
    """A config directory of the model at another depth."""
    folder.mkdir()
    settings = json.loads(CONFIG.read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def capture_config(config: Path) -> ModelGraph:
    """Open, build and capture, as ``autopar plan`` does."""
    source = open_model(config)
    return capture(
        source.build(device="meta"),
        source.example_inputs(SEQ_LEN),
        compute_dtype=torch.bfloat16,
        name=source.name,
    )


def rewrite(graph: ModelGraph, chosen: Plan) -> None:
    """Lower ``graph``, all in one segment, under the layout of a plan for fewer layers."""
    segment = chosen.segments[0]
    lower(
        graph,
        chosen.typed_layout(),
        mesh=chosen.device_mesh(),
        micro_batch_size=chosen.batch.micro_batch_size,
        segments=(dataclasses.replace(segment, last_block=len(graph.blocks) - 1),),
    )


def timed(work: Callable[[], Result]) -> tuple[Result, float, float]:
    """A result, the seconds on the clock and those of the CPU."""
    clock, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - clock, time.process_time() - cpu


if __name__ == "__main__":
    main()
