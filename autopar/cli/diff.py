"""``autopar diff``."""

from __future__ import annotations

import argparse
import dataclasses
import json

from autopar.api import diff


def run(arguments: argparse.Namespace) -> int:
    """Print what differs between two plans, in words or as JSON."""
    found = diff(arguments.one, arguments.other)
    print(json.dumps(dataclasses.asdict(found), indent=1) if arguments.json else found.explain())
    return 0
