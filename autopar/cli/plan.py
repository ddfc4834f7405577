"""``autopar plan``."""

from __future__ import annotations

import argparse
import sys

from autopar import api
from autopar.api.arguments import PlanArguments, only
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
    given = only(PlanArguments, vars(arguments))
    if given.get("max_grad_norm") == 0:
        given["max_grad_norm"] = None
    given["pin"] = {name: value for name, value in pins.items() if value is not None}
    given["progress"] = _show if sys.stderr.isatty() else None
    plan = api.plan(arguments.model, cluster, **given)
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
