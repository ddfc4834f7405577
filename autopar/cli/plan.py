"""``autopar plan``."""

from __future__ import annotations

import argparse
import sys

from autopar import api
from autopar.api.arguments import PlanArguments, only
from autopar.cli.options import CHOICE_PINS, INTEGER_PINS, OPEN_PINS, TEXT_PINS
from autopar.ir.plan import to_json


def run(arguments: argparse.Namespace) -> int:
    """Plan, write the plan, and print it in words or as JSON."""
    cluster = cluster_of(arguments)
    if arguments.output is not None:
        api.check_writable(arguments.output)
    plan = api.plan(arguments.model, cluster, **only(PlanArguments, given_of(arguments)))
    if sys.stderr.isatty():
        show("")
    if arguments.output is not None:
        try:
            plan.save(arguments.output)
        except OSError as error:
            raise api.cannot_write(arguments.output, error) from None
    print(to_json(plan) if arguments.json else plan.explain())
    return 0


def cluster_of(arguments: argparse.Namespace) -> api.Cluster:
    """The cluster that is asked for."""
    return api.Cluster(
        arguments.cluster, nodes=arguments.nodes, gpus_per_node=arguments.gpus_per_node
    )


def given_of(arguments: argparse.Namespace) -> dict[str, object]:
    """All options by their names in Python, those among them that functions take."""
    names = (*INTEGER_PINS, *OPEN_PINS, *CHOICE_PINS, *TEXT_PINS)
    pins = {name: getattr(arguments, name) for name in names}
    given: dict[str, object] = {
        **vars(arguments),
        "pin": {name: value for name, value in pins.items() if value is not None},
        "progress": show if sys.stderr.isatty() else None,
    }
    if given.get("max_grad_norm") == 0:
        given["max_grad_norm"] = None
    return given


def show(message: str) -> None:
    print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)
