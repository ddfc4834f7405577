"""``autopar plan``."""

from __future__ import annotations

import argparse
import sys

from autopar import api
from autopar.cli import CHOICE_PINS, INTEGER_PINS, TEXT_PINS
from autopar.ir.plan import to_json


def run(arguments: argparse.Namespace) -> int:
    """Plan, write the plan, and print it in words or as JSON."""
    cluster = api.Cluster(
        arguments.cluster, nodes=arguments.nodes, gpus_per_node=arguments.gpus_per_node
    )
    if arguments.output is not None:
        api.check_writable(arguments.output)
    pins = {name: getattr(arguments, name) for name in (*INTEGER_PINS, *CHOICE_PINS, *TEXT_PINS)}
    plan = api.plan(
        arguments.model,
        cluster,
        global_batch_size=arguments.global_batch_size,
        seq_len=arguments.seq_len,
        precision=arguments.precision,
        gradient_dtype=arguments.gradient_dtype,
        reduce_dtype=arguments.reduce_dtype,
        optimizer=arguments.optimizer,
        learning_rate=arguments.learning_rate,
        weight_decay=arguments.weight_decay,
        max_grad_norm=arguments.max_grad_norm or None,
        seed=arguments.seed,
        pin={name: value for name, value in pins.items() if value is not None},
        progress=_show if sys.stderr.isatty() else None,
    )
    if sys.stderr.isatty():
        _show("")
    if arguments.output is not None:
        try:
            plan.save(arguments.output)
        except OSError as error:
            raise api.cannot_write(arguments.output, error) from None
    print(to_json(plan) if arguments.json else plan.explain())
    return 0


def _show(message: str) -> None:
    print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)
