"""The ``autopar`` command. Importing it and asking for help load neither torch nor ortools."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from autopar import __version__
from autopar.ir.errors import AutoparError

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
    "sequence_parallel",
    "loss_parallel",
)
STARTED_BY_US = "AUTOPAR_STARTED"
"""Set in the environment of ranks that ``autopar run`` starts; it prints their errors."""
_FEW_COLLECTIONS = (50_000, 20, 50)
"""Thresholds of the garbage collector for commands that end soon: modules and graphs make many
objects that stay, and looking through them again and again takes a tenth of the time."""
CHOICE_PINS = {
    "recompute": ("none", "selective", "selective_op", "selective_layer", "blocks", "full"),
    "schedule": ("1f1b", "interleaved", "layered"),
    "cuts": ("balanced", "even"),
}
TEXT_PINS = ("kernel",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: ``sys.argv``) and return its exit status.

    0 is success, 1 an error that the user can mend (one message on stderr), 2 a wrong command line.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 2
    if os.getcwd() not in sys.path:  # package.module:function is found here, as under python -m
        sys.path.insert(0, os.getcwd())
    if arguments.command != "run":
        gc.set_threshold(*_FEW_COLLECTIONS)
    try:
        command = importlib.import_module(f"autopar.cli.{arguments.command}")
        status: int = command.run(arguments)
        sys.stdout.flush()
    except AutoparError as error:
        _report(str(error))
        return 1
    except BrokenPipeError:  # the reader of our output has gone: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return 130
    return status


def _report(message: str) -> None:
    """The one message of an error, on stderr.

    One of several ranks hands it to the process that started it, where there is such a file; the
    first rank of a node alone prints it, unless the process that started it does.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        Path(error_file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))
    if STARTED_BY_US not in os.environ and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"autopar: error: {message}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autopar",
        description="Plan and run parallel training of PyTorch transformers.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_plan_arguments(
        commands.add_parser(
            "plan",
            help="find the fastest plan for a model on a cluster",
            description="Find the fastest plan for a model on a cluster. No weights are allocated "
            "and no GPU is needed.",
        )
    )
    _add_sweep_arguments(
        commands.add_parser(
            "sweep",
            help="plan over GPUs, batches or lengths",
            description="Plan at each of several GPU counts, global batches or sequence lengths: "
            "step time, speed, MFU and memory as a table, and as a plot.",
        )
    )
    _add_explain_arguments(commands.add_parser("explain", help="say a plan in words"))
    _add_diff_arguments(
        commands.add_parser(
            "diff",
            help="say what differs between two plans",
            description="Say what differs between two plans: decisions, and time and memory by "
            "cause side by side.",
        )
    )
    _add_simulate_arguments(
        commands.add_parser(
            "simulate",
            help="simulate the step of a plan",
            description="Simulate the step of a plan action by action, from the numbers that the "
            "plan stores: seconds and held bytes of each stage, and a trace.",
        )
    )
    _add_estimate_arguments(
        commands.add_parser(
            "estimate",
            help="estimate each layout of a table",
            description="Estimate the step and the memory of each row of a table: a model by its "
            "sizes, GPUs, and a layout. Layouts that do not fit are estimated, too.",
        )
    )
    _add_run_arguments(
        commands.add_parser(
            "run",
            help="train the model of a plan",
            description="Train the model that the plan names, one JSON line a step. Starts the "
            "ranks of one node itself; start it under torchrun for several nodes.",
        )
    )
    _add_ops_arguments(
        commands.add_parser(
            "ops",
            help="list the ops of a model and the rules that split them",
            description="List each op of a model, how often it occurs, and the rule by which it is "
            "split; an op without a rule is replicated, and what that costs is said.",
        )
    )
    _add_calibrate_arguments(
        commands.add_parser(
            "calibrate",
            help="measure this machine and write a hardware file",
            description="Measure this machine and write a hardware file. Starts the ranks of one "
            "node itself; start it under torchrun for several nodes.",
        )
    )
    commands.add_parser("schema", help="print the JSON Schema of a plan")
    return parser


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
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


def _add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
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
        help="a100-80gb, a100-40gb, h100-80gb, cpu-local, or a hardware file "
        "(default: %(default)s)",
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N")
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
    for name, choices in CHOICE_PINS.items():
        pins.add_argument(_flag(name), dest=name, choices=choices)
    for name in TEXT_PINS:
        pins.add_argument(_flag(name), dest=name, metavar="TEXT")


def _add_ops_arguments(parser: argparse.ArgumentParser) -> None:
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


def _add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN.json")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print what the explanation is made of as JSON",
    )


def _add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("one", type=Path, metavar="A.json")
    parser.add_argument("other", type=Path, metavar="B.json")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN.json")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="TRACE.json",
        help="write a trace for Perfetto or chrome://tracing here",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _add_estimate_arguments(parser: argparse.ArgumentParser) -> None:
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


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
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


def _add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
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


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
