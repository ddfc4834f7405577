"""Writes the pages of docs/papers: ``python -m benchmarks.papers [PAGE…]``."""

from __future__ import annotations

import importlib
import logging
import sys
import time
from collections.abc import Sequence

from benchmarks.papers.pages import write_page

PAGES = ("zero", "hagemann", "hardware", "layered")


def main(names: Sequence[str]) -> None:
    """Write the pages, and print what is in them."""
    logging.disable(logging.WARNING)
    unknown = set(names) - set(PAGES)
    if unknown:
        sys.exit(f"no page is called {', '.join(sorted(unknown))}; there are {', '.join(PAGES)}")
    for name in names or PAGES:
        started = time.perf_counter()
        parts, plots = importlib.import_module(f"benchmarks.papers.{name}").main()
        for title, text in parts.items():
            print(f"\n{name}, {title}\n\n{text}")
        write_page(name, parts, plots)
        print(f"\n{name}.md: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
