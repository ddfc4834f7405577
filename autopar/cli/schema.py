"""``autopar schema``."""

from __future__ import annotations

import argparse
import json

from autopar.ir.plan import json_schema


def run(arguments: argparse.Namespace) -> int:
    """Print the JSON Schema of a plan."""
    print(json.dumps(json_schema(), indent=1))
    return 0
