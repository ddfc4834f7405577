"""Text tables for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def named_rows(rows: Sequence[tuple[str, str]]) -> str:
    """Rows of a name and a text, indented; further lines of a text stand below its first."""
    width = max((len(name) for name, _ in rows), default=0)
    below = "\n" + " " * (width + 4)
    return "\n".join(f"  {name:<{width}}  {text.replace(chr(10), below)}" for name, text in rows)


def columns(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)
) -> str:
    """A table with a head: columns in ``left`` to the left, all others to the right."""
    lines = [head, *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
