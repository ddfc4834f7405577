"""The options of each command."""

from __future__ import annotations

import argparse
from pathlib import Path

PRECISIONS = ("bf16", "fp16", "fp32", "float64")
OBJECTIVES = ("step_time", "cost", "gpus", "training_time")
INTEGER_PINS = (
    "tp",
    "pp",
    "cp",
    "ep",
    "dp_replicate",
    "dp_shard",
    "micro_batch_size",
    "zero_stage",
    "virtual_stages",
    "extra_in_flight",
    "sequence_parallel",
    "loss_parallel",
    "loss_chunks",
    "gather_again",
)
OPEN_PINS = ("offload_optimizer", "offload_activations")
CHOICE_PINS = {
    "recompute": ("none", "selective", "selective_op", "selective_layer", "blocks", "full"),
    "schedule": ("1f1b", "interleaved", "layered", "zero_bubble"),
    "cuts": ("balanced", "even"),
    "shares": ("balanced", "equal"),
}
TEXT_PINS = ("kernel", "group_order", "axis_order", "zero_stages")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model_arguments(parser)
    goal = parser.add_argument_group("what is to be best, over which GPUs")
    goal.add_argument("--objective", choices=OBJECTIVES, default=argparse.SUPPRESS)
    goal.add_argument(
        "--gpus",
        type=_gpu_range,
        metavar="N or LOW:HIGH",
        help="GPUs, or a range of them to choose from, instead of --nodes; default: all",
    )
    goal.add_argument(
        "--price-per-gpu-hour", type=float, metavar="PRICE", help="for --objective cost"
    )
    goal.add_argument(
        "--deadline-s",
        type=float,
        metavar="SECONDS",
        help="for --objective gpus: of a step, or with --token-budget of the training",
    )
    goal.add_argument(
        "--token-budget", type=float, metavar="TOKENS", help="of a training with small batches"
    )
    goal.add_argument(
        "--critical-batch-size",
        type=float,
        metavar="SEQUENCES",
        help="batch at which a training takes twice the fewest steps",
    )
    parser.add_argument(
        "--warm-start",
        type=Path,
        metavar="OLD.json",
        help="a plan whose decisions are tried first",
    )
    parser.add_argument(
        "--time-limit",
        dest="time_limit_s",
        type=float,
        metavar="SECONDS",
        help="of searching; then the best that was found is taken, with its bound",
    )
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="also what more memory or network would buy, and what runners-up cost",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PLAN.json", help="write the plan here"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the plan as JSON instead of words"
    )
    _add_pins(parser)


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model_arguments(parser)
    parser.add_argument(
        "--over",
        choices=("gpus", "batch", "length"),
        required=True,
        help="GPUs, sequences of a step, or tokens of a sequence",
    )
    parser.add_argument(
        "--values",
        required=True,
        metavar="A,B,… or LOW:HIGH",
        help="a range has all GPU counts that make sense, or doublings",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="SWEEP.csv", help="write the table here as CSV"
    )
    parser.add_argument("--plot", type=Path, metavar="SWEEP.svg", help="write a plot here")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _add_pins(parser)


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """A model, a cluster, and how it is trained."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face config.json or its directory, or package.module:function",
    )
    parser.add_argument(
        "--cluster",
        default="a100-80gb",
        metavar="NAME",
        help="a100-80gb, a100-40gb, h100-80gb, cpu-local, or a hardware or cluster file "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="default: 1, or as in the cluster file"
    )
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="default: as in the hardware file"
    )
    parser.add_argument(
        "--global-batch-size", type=int, metavar="SEQUENCES", help="sequences per step"
    )
    parser.add_argument(
        "--seq-len", type=int, metavar="TOKENS", help="default: the model's longest"
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="of compute; default: as the device does best",
    )
    parser.add_argument(
        "--gradient-dtype",
        choices=PRECISIONS,
        help="in which gradients are accumulated; default: fp32 or wider",
    )
    parser.add_argument(
        "--reduce-dtype",
        choices=PRECISIONS,
        help="in which gradients are sent; default: as they are accumulated",
    )
    unless = argparse.SUPPRESS  # what is not given is what ``autopar.plan`` has by default
    parser.add_argument("--optimizer", choices=("adamw", "adam", "sgd"), default=unless)
    parser.add_argument("--learning-rate", type=float, default=unless)
    parser.add_argument("--weight-decay", type=float, default=unless)
    parser.add_argument(
        "--max-grad-norm", type=float, default=unless, help="0 switches clipping off"
    )
    parser.add_argument("--seed", type=int, default=unless)


def _add_pins(parser: argparse.ArgumentParser) -> None:
    pins = parser.add_argument_group("decisions to pin instead of searching")
    for name in INTEGER_PINS:
        pins.add_argument(_flag(name), dest=name, type=int, metavar="N")
    for name in OPEN_PINS:
        pins.add_argument(_flag(name), dest=name, type=_number_or_open, metavar="N or open")
    for name, choices in CHOICE_PINS.items():
        pins.add_argument(_flag(name), dest=name, choices=choices)
    for name in TEXT_PINS:
        pins.add_argument(_flag(name), dest=name, metavar="TEXT")


def add_ops_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face config.json or its directory, or package.module:function",
    )
    parser.add_argument(
        "--cluster",
        default="a100-80gb",
        metavar="NAME",
        help="what the cost of replicated ops is told for (default: %(default)s)",
    )
    parser.add_argument(
        "--seq-len", type=int, metavar="TOKENS", help="default: the model's longest"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN.json")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print what the explanation is made of as JSON",
    )


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("one", type=Path, metavar="A.json")
    parser.add_argument("other", type=Path, metavar="B.json")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN.json")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="TRACE.json",
        help="write a trace for Perfetto or chrome://tracing here",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_estimate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rows", type=Path, metavar="ROWS.csv")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PRED.csv",
        help="write the estimates here; default: print them",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes; default: one for each CPU"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one object a row")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN.json")
    parser.add_argument("--steps", type=int, default=10, metavar="N")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="TOKENS.npy",
        help="token ids, [tokens] or [sequences, tokens]; default: synthetic",
    )
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="write a checkpoint here at the end"
    )
    parser.add_argument("--load", type=Path, metavar="DIR", help="go on from this checkpoint")


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="MINE.toml", help="write it here"
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="ranks of this node; default: as in the base"
    )
    parser.add_argument(
        "--hardware",
        metavar="BASE",
        help="known hardware, or a file, for what cannot be measured here; default: by device",
    )
    parser.add_argument("--quick", action="store_true", help="measure less: under 20 s")


def _gpu_range(text: str) -> int | tuple[int, int]:
    low, colon, high = text.partition(":")
    return (int(low), int(high)) if colon else int(low)


def _number_or_open(text: str) -> int | str:
    return text if text == "open" else int(text)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
