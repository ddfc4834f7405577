"""The `autopar` command. Importing it and asking for help load neither torch nor ortools."""

import argparse
from collections.abc import Sequence

from autopar import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: `sys.argv`) and return its exit status."""
    parser = _parser()
    parser.parse_args(argv)
    parser.print_help()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autopar",
        description="Plan and run parallel training of PyTorch transformers.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser
