"""The ``autopar`` command. Importing it and asking for help load neither torch nor ortools."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from autopar.cli.parser import make_parser
from autopar.ir.errors import AutoparError

STARTED_BY_US = "AUTOPAR_STARTED"
"""Set in the environment of ranks that ``autopar run`` starts; it prints their errors."""
_FEW_COLLECTIONS = (50_000, 20, 50)
"""Thresholds of the garbage collector for commands that end soon: modules and graphs make many
objects that stay, and looking through them again and again takes a tenth of the time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: ``sys.argv``) and return its exit status.

    0 is success, 1 an error that the user can mend (one message on stderr), 2 a wrong command line.
    """
    parser = make_parser()
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
