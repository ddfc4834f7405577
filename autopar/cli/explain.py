"""``autopar explain``."""

from __future__ import annotations

import argparse
import json

from autopar.ir.plan import read_plan, to_json

PARTS = ("certificate", "prediction", "alternatives", "search", "what_if")
"""What the explanation of a plan is made of, beside its decisions."""


def run(arguments: argparse.Namespace) -> int:
    """Print a plan in words, or what is said of it as JSON."""
    plan = read_plan(arguments.plan)
    if arguments.json:
        document = json.loads(to_json(plan))
        print(json.dumps({key: document[key] for key in PARTS}, indent=1))
    else:
        print(plan.explain())
    return 0
