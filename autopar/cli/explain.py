"""``autopar explain``."""

from __future__ import annotations

import argparse
import json

from autopar.ir.plan import read_plan, to_json


def run(arguments: argparse.Namespace) -> int:
    """Print a plan in words, or its certificate and prediction as JSON."""
    plan = read_plan(arguments.plan)
    if arguments.json:
        document = json.loads(to_json(plan))
        print(json.dumps({key: document[key] for key in ("certificate", "prediction")}, indent=1))
    else:
        print(plan.explain())
    return 0
