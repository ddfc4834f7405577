"""Files that are written for a user: all of a text or nothing, and known beforehand."""

from __future__ import annotations

import os
from pathlib import Path

from autopar.ir.errors import InputError


def check_writable(path: Path, what: str = "plan") -> None:
    """Fail before the work, not after it, when the file ``path`` cannot be written.

    Raises:
        InputError: It cannot; the message calls it the ``what``.
    """
    existed = path.exists()
    try:
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise cannot_write(path, error, what) from None


def write_text(path: Path, text: str, what: str) -> None:
    """All of ``text`` or nothing: a file that is there is replaced once the new one is complete.
    What is no regular file (a pipe, a device) is written to.

    Raises:
        InputError: It cannot be written; the message calls it the ``what``.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8", newline="")
            return
        target = path.resolve()
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8", newline="")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(path, error, what) from None


def cannot_write(path: Path, error: OSError, what: str = "plan") -> InputError:
    """The error of a file that could not be written."""
    return InputError(
        f"cannot write the {what}: {error.strerror or error}",
        where=str(path),
        hint="give a file in a directory that exists and may be written",
    )
