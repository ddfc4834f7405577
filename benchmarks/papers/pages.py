"""Pages whose tables a command writes between markers; the text around them is written by hand."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "papers"

LINE = 100
"""Characters of a line of documentation."""

_VERDICTS = {True: "Agrees", False: "Disagrees", None: "Beyond it"}

_MARKED = re.compile(r"<!-- begin (?P<name>[\w-]+) -->\n.*?<!-- end (?P=name) -->", re.S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a paper says, what the cost model says, and whether they agree.

    ``agrees`` is None of what the paper does not speak of.
    """

    paper: str
    ours: str
    agrees: bool | None


def findings(rows: Iterable[Finding]) -> str:
    """A list of them."""
    return "\n".join(
        textwrap.fill(
            f"- **{_VERDICTS[row.agrees]}.** Paper: {row.paper}. autopar: {row.ours}.",
            LINE,
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
        for row in rows
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def markers(text: str) -> tuple[str, ...]:
    """Names of the parts of a page that are written by a command."""
    return tuple(found["name"] for found in _MARKED.finditer(text))


def filled(text: str, parts: Mapping[str, str]) -> str:
    """The page with ``parts`` between its markers.

    Raises:
        ValueError: The page has other markers than ``parts`` has names.
    """
    if sorted(markers(text)) != sorted(parts):
        raise ValueError(f"the page has {sorted(markers(text))}, written are {sorted(parts)}")

    def part(found: re.Match[str]) -> str:
        name = found["name"]
        return f"<!-- begin {name} -->\n{parts[name]}\n<!-- end {name} -->"

    return _MARKED.sub(part, text)


def write_page(name: str, parts: Mapping[str, str], plots: Mapping[str, str]) -> None:
    """Fill ``docs/papers/NAME.md`` and write its plots beside it."""
    page = DOCS / f"{name}.md"
    page.write_text(filled(page.read_text(), parts))
    for plot, svg in plots.items():
        (DOCS / f"{plot}.svg").write_text(svg)
