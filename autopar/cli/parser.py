"""The commands of ``autopar``. Importing this loads neither torch nor ortools."""

from __future__ import annotations

import argparse

from autopar import __version__
from autopar.cli import options


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; ``command`` names what to run, None: nothing."""
    parser = argparse.ArgumentParser(
        prog="autopar",
        description="Plan and run parallel training of PyTorch transformers.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    options.add_plan_arguments(
        commands.add_parser(
            "plan",
            help="find the fastest plan for a model on a cluster",
            description="Find the fastest plan for a model on a cluster. No weights are allocated "
            "and no GPU is needed.",
        )
    )
    options.add_sweep_arguments(
        commands.add_parser(
            "sweep",
            help="plan over GPUs, batches or lengths",
            description="Plan at each of several GPU counts, global batches or sequence lengths: "
            "step time, speed, MFU and memory as a table, and as a plot.",
        )
    )
    options.add_explain_arguments(commands.add_parser("explain", help="say a plan in words"))
    options.add_diff_arguments(
        commands.add_parser(
            "diff",
            help="say what differs between two plans",
            description="Say what differs between two plans: decisions, and time and memory by "
            "cause side by side.",
        )
    )
    options.add_simulate_arguments(
        commands.add_parser(
            "simulate",
            help="simulate the step of a plan",
            description="Simulate the step of a plan action by action, from the numbers that the "
            "plan stores: seconds and held bytes of each stage, and a trace.",
        )
    )
    options.add_estimate_arguments(
        commands.add_parser(
            "estimate",
            help="estimate each layout of a table",
            description="Estimate the step and the memory of each row of a table: a model by its "
            "sizes, GPUs, and a layout. Layouts that do not fit are estimated, too.",
        )
    )
    options.add_run_arguments(
        commands.add_parser(
            "run",
            help="train the model of a plan",
            description="Train the model that the plan names, one JSON line a step. Starts the "
            "ranks of one node itself; start it under torchrun for several nodes.",
        )
    )
    options.add_ops_arguments(
        commands.add_parser(
            "ops",
            help="list the ops of a model and the rules that split them",
            description="List each op of a model, how often it occurs, and the rule by which it is "
            "split; an op without a rule is replicated, and what that costs is said.",
        )
    )
    options.add_calibrate_arguments(
        commands.add_parser(
            "calibrate",
            help="measure this machine and write a hardware file",
            description="Measure this machine and write a hardware file. Starts the ranks of one "
            "node itself; start it under torchrun for several nodes.",
        )
    )
    commands.add_parser("schema", help="print the JSON Schema of a plan")
    return parser
